"""Trades for memory of the device: activations that are computed again, or stored in host memory as
gradients and the optimizer's state may be."""
