"""The experts of a graph: their numbers, their versions and how versions are merged."""
