"""Benchmarks: time and memory of operators, backbones and training steps; the scripts in tools/ print and draw them."""
