"""Processes: started, kept, restarted, signalled, their logs."""
