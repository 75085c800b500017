"""Analysis of attention: ``probes`` record and measure it, ``figures`` draw it, ``report`` counts and lists."""
