"""Base classes of the three kinds of gates and of the adapters, and the mechanism that gates a module in place."""
