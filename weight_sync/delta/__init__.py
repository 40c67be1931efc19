"""The delta format: encoding, and applying it to weights in place."""
