"""The plan of a job: devices, processes, files and credentials, decided before anything starts."""
