"""Skills: their files, their checks, and the graph that plans over them."""
