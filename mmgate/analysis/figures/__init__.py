"""Figures of the readings that the probes record."""
