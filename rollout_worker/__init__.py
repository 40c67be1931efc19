"""A rollout replica: leases groups of prompts, generates, scores, pushes, and follows the published weights."""
