"""Where skills come from."""
