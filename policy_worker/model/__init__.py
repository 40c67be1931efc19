"""The model: loading, log-probabilities, micro-batches, optimizer and its schedule."""
