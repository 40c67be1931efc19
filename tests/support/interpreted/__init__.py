"""The folder that `sitecustomize` is found in."""
