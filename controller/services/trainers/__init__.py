"""The calls of policy replicas: who trains (`members`), and batches and commits (`steps`)."""
