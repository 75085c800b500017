"""Linear attentions of other papers, one file each, with which Agent attention and SAGA are compared."""
