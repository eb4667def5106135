"""Environments that walk a plan of tasks in any game."""
