"""Games of other libraries: an adapter for each, a leaf that needs an extra of that name."""
