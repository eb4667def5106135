"""Several learners in one process: independent agents of a world, and skills of a graph."""
