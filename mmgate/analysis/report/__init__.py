"""Models in numbers: what they are made of, what they compute."""
