"""The objects of a job on Kubernetes, as plain values: a pure function of what `base.ClusterJob` holds.

base         names, labels, containers, volumes: what all objects have in common
services     what there is once: configuration, secrets, accounts, volume, network, Valkey, controller
workers      policy and rollout pods
scaling      who obeys the controller's number of rollout replicas
"""
