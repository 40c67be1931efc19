"""What is traded for memory of the device: activations that are computed again, or stored in host memory."""
