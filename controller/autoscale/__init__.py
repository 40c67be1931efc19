"""How many rollout replicas a job needs: measured (`meter`), decided (`policy`). Pure; time comes in as `now`."""
