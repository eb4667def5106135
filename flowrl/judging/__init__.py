"""Judges score trajectories and skills' texts; objectives and convergence decide by measures."""
