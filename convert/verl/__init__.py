"""Reads verl's configurations: one module per section of theirs."""
