"""The ledger alone, and the jobs it is simulated in."""
