"""Weights of a replica: which version it follows, its host's copy, what it reports."""
