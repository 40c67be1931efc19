"""The sections of the configuration, one module per table."""
