"""The store against a real Valkey."""
