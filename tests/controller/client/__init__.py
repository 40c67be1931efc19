"""The client: what it tries again, and what it raises."""
