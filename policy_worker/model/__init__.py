"""The model: loading, log-probabilities, micro-batches."""
