"""Which backend of an operator a run takes."""
