"""Proximal policy optimisation of several experts that take turns in one episode."""
