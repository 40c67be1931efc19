"""From a lease to a pushed group: leasing, generation and scoring (`pipeline`), tokens to text, pushing."""
