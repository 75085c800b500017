"""Bases of the papers' layers: the three kinds of gates, the hosts' adapters, and the mechanism that gates a module."""
