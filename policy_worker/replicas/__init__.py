"""Policy replicas that train together, each some parts of each batch.

base          what a step needs of them; a replica that trains alone
round         what a replica does with the others in a step: compute, agree, exchange, apply
membership    what it asks of the controller
identity      by what replicas find out that they are alike
rendezvous    where processes meet
gradients     those of a rank as one vector, and the sum over the parts of a batch
exchange      what an exchange is, and how it ends
transports    by a process group of the same rank of each replica (gloo, NCCL); by a weight store, which all see
"""
