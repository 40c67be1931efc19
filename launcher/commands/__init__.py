"""The commands of `cosmos-launch`, by meaning. Imports are inside the functions: each loads only what it needs."""
