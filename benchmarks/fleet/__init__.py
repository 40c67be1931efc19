"""A rollout fleet on a virtual clock: real ledger and autoscaler; simulated engines, trainer and platform."""
