"""What runs where: devices, processes, files and credentials of a job, decided before anything starts."""
