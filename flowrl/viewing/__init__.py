"""Films of episodes, and plots of how graphs learn."""
