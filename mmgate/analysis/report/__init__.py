"""Runs, studies and models in tables and pages."""
