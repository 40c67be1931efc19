"""The controller's state of one job apart from its ledger, pure."""
