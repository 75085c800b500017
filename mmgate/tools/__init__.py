"""The tools as modules, for where no checkout is at hand: ``python -m mmgate.tools.train CONFIG``."""
