"""The controller: owns the config, leases prompts, keeps the ledger of groups, assembles batches."""
