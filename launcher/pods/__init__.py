"""The programs in a job's pods on Kubernetes: their roles, and the scaler that follows the controller's number.

pod           `cosmos-launch pod ROLE`: the part of one pod, from its environment to a termination message
children      processes of a pod, their output and their end
autoscale     `cosmos-launch autoscale`: one Deployment follows the controller
costs         which rollout pods go first when their number falls
api_server    the cluster's, for a service account
"""
