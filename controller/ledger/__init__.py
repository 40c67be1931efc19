"""The ledger, pure: groups and their states, admission, assembly, checkpoints, replay and reconciliation."""
