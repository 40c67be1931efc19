"""Reads cosmos-rl's configurations."""
