"""What an agent can learn: skill files, their checks, and the graph that plans over them."""
