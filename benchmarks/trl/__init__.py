"""The trainer and whole jobs compared with TRL's."""
