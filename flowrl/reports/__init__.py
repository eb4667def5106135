"""Reports of graphs for people and scripts: rows, tables and documents of their state."""
