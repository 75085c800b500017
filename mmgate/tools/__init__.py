"""The tools as modules, for use without a checkout: ``python -m mmgate.tools.train CONFIG``."""
