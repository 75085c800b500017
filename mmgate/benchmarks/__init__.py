"""Measure time and memory of operators, backbones and training steps; scripts in tools/ print and draw the results."""
