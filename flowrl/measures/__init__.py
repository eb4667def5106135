"""Measures of runs: objectives that put them together, and whether a run still learns. No JAX."""
