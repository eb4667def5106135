"""Judges of episodes and of skills' texts, and how far their scores are to be trusted."""
