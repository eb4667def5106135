"""Starting runs and hearing of their ends."""
