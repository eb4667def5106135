"""Runs with replicas: the averager's process, rounds in a folder, and the replicas' trainer."""
