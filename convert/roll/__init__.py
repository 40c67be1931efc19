"""Reads ROLL's configurations: one module per section of theirs."""
