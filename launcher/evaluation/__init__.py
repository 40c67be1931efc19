"""`cosmos-launch eval`: several models on the same prompts, each in a job of its own, one after the other."""
