"""Draw with matplotlib what the probes have recorded of a model's attention."""
