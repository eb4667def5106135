"""The web page of `flowrl serve`: documents of graphs, what changed in them, and the server."""
