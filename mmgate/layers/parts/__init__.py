"""Parts of layers: norms, feed-forward networks, biases, windows of maps, resized positions, checks of options."""
