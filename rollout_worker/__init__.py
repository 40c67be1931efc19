"""A rollout replica of cosmos-launch: leases groups, generates, scores, pushes, and follows the published weights."""
