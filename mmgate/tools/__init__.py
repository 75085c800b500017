"""Command lines for use without a checkout of the repository: ``python -m mmgate.tools.train CONFIG``."""
