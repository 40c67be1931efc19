"""Checks on this machine before anything starts: devices, memory, models, engines."""
