"""The bodies of experts: shapes, networks, and the routing of rows to experts."""
