"""One training step, of either algorithm, and the loop around it."""
