"""Process groups, and parallelisms as functions that take a model and a mesh."""
