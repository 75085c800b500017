"""Trials: runs of several models and seeds, compared in pairs."""
