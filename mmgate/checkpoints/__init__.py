"""Checkpoints from strangers: read without running what a pickle asks for."""
