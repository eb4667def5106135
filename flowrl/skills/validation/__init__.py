"""Skill code is hostile until it is approved: syntax, cost, names, then a dry run."""
