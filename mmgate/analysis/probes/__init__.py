"""Record gates, attention maps and sampling points while a model runs, and compute measures from them."""
