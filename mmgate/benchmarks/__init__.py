"""How fast it is: timing, memory, tables, plots and listings of kernels; the scripts in tools/ show the result."""
