"""Buckets and file systems of others: their addresses, and what the environment says of S3."""
