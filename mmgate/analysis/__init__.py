"""What attention does: what figures and tables are computed from; tools/ parses arguments and shows the result."""
