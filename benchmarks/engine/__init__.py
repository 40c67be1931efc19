"""The engines alone."""
