"""A faster step apart from attention: matching, compiled parts, memory layout."""
