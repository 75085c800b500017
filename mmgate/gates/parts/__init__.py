"""Parts that several layers use: norms, feed-forward networks, stripes of a map, resizing, checks of options."""
