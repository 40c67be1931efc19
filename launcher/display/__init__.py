"""The view of a job that people see: a panel or lines while it runs, a table at its end."""
