"""Parts that several layers use: norms, feed-forward networks, biases, windows, resizing, checks of options."""
