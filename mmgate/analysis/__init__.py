"""Analysis of attention: ``probes`` record and measure it, ``figures`` draw it, ``complexity`` and ``structure`` count and list."""
