"""Averages of what several trainers learned: rules, messages, and coordinators of rounds.

Nothing here imports JAX. A *round* is an average that counts: all its members get the same bits.
"""
