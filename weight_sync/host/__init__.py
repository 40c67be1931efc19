"""The one copy of the weights per host: brought forward, shared and guarded by its replicas."""
