"""The reference of the configuration: JSON schema, reference page, observables, what others call a key."""
