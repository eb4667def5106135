"""Environments that walk a plan of tasks, over Craftax."""
