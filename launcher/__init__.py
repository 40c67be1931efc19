"""`cosmos-launch`: checks a configuration, starts the processes of a job, keeps them alive and ends them."""
