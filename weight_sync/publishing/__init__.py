"""The trainer's half: a version gathered from its owners, encoded, written, announced, and its chain."""
