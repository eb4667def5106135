"""Independent learners: many agents in one world, none of which shares anything."""
