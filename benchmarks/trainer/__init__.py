"""What a training step costs, in time and memory."""
