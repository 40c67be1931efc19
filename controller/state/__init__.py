"""What the controller knows of one job apart from its ledger, pure."""
