"""Training many skills at once: the scheduler, what a run is given, and what becomes of it."""
