"""Sweeps: trials of a skill's hyper-parameters, which are ordinary runs."""
