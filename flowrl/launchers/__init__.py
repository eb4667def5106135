"""Start jobs, on tmux or as plain processes, and find out how they ended."""
