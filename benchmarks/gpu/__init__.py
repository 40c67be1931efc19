"""What works on a GPU, and how fast: `make gpu`."""
