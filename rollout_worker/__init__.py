"""A rollout replica: leases groups, generates, scores, pushes, and follows the published weights."""
