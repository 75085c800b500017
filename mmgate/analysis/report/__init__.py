"""Models in numbers: their parts and their multiply-accumulates."""
