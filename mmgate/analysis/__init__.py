"""Look at attention: ``probes`` record it in a run, ``figures`` draw it, ``complexity`` counts operations."""
