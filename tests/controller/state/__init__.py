"""The state of one job."""
