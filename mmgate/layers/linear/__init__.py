"""Linear attentions to compare with, one file each."""
