"""Rows of the user's datasets: which files or splits are read, and their rows one after the other."""
