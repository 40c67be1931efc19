"""The controller under load."""
