"""Analysis of attention: probes read it, figures draw it, ``complexity`` counts it, ``structure`` lists it."""
