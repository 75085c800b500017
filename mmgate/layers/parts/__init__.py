"""Parts of layers: norms, feed-forward networks, biases, stripes of maps, resized positions."""
