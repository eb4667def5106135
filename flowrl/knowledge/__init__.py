"""Facts of a game: read from its modules, or probed by single actions in built worlds."""
