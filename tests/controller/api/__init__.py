"""HTTP as clients see it: roles, limits, connections, routes."""
