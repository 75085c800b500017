"""A small language model with gated attention, the study of it, and a converter of published ones."""
