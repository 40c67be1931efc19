"""Models that learn, with the frozen ones next to them, and the verbs of a training step."""
