"""Load checkpoints safely: no code in the file is run."""
