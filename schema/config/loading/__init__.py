"""From what the user wrote to a `Config`: files, environment and --set, their faults in the user's words."""
