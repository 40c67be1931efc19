"""Hydra's words and composition, by themselves and next to Hydra."""
