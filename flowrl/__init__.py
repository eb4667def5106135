"""flowrl trains a graph of skills in parallel and merges them into one agent."""

__version__ = "0.1.0"
