"""Versions of the weights."""
