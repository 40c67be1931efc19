"""How a job is started elsewhere than by this command on this machine."""
