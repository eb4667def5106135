"""Games: one object for each, found by its name."""
