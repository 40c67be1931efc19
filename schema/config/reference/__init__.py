"""What the configuration says of itself: JSON schema, reference page, observables, what others call a key."""
