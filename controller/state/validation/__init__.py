"""Validation: what is due, who works on it, and what came out."""
