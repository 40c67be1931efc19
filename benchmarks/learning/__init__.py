"""What is learned: trainer and engine take turns in one process."""
