"""Figures of what the probes found."""
