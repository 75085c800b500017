"""Readings of attention while a model runs (gates, maps, sampling points) and measures computed from them."""
