"""Infrastructure that several packages need, once: standard library only.

atomic_file    files and directories that are whole or absent
file_lock      flock without waiting
backoff        exponential, with jitter
exit_watchdog  the end of a process that was asked to leave and hangs
host           the machine's boot id
memory_kills   whether the kernel has killed for lack of memory
text           control characters in the texts of others
threads        work in daemon threads, as futures
tls            contexts and checks of certificates
"""
