"""Loading of checkpoints, which runs no code of the file."""
