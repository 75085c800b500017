"""What figures and tables are computed from; the scripts in tools/ parse arguments and show the result."""
