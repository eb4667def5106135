"""What an agent can learn: skill files, the gate they pass, and the graph that plans over them."""
