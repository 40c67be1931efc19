"""Gradients between policy replicas, which compute some parts of each batch each.

gradients     those of a rank as one row of numbers, and the sum over the parts of a batch
base          what an exchange is, and how it ends
transports    by a process group of the same rank of each replica (gloo, NCCL); by a weight store, which all see
"""
