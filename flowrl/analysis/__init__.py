"""Contracts of skills against what was played: what episodes and experiments disprove."""
