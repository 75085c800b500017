"""What attention does while a model runs: gates, maps, sampling points, and the measures computed from them."""
