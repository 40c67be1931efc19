"""What people see of a job: a panel or lines while it runs, a table at its end."""
