"""Infrastructure that several packages need, once: standard library only."""
