"""Graphs of the original research code: read as hostile files, written as a graph of flowrl."""
