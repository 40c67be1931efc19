"""`python -m tests.drill`: a job of rendered manifests in pods made of namespaces, through load and loss.

network      an address for each pod, addresses of Services, and what NetworkPolicies forbid
pod          a container as a kubelet runs it: user, volumes, read-only root, variables, its end
cluster      what a control plane does: pods of workloads on nodes, replacements, Services, a scaler
script       what happens to the job, and what it did
"""
