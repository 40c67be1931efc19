"""Infrastructure that several packages need, once: standard library only.

atomic_file    files and directories that are whole or absent
file_lock      flock without waiting
backoff        exponential, with jitter
gpus           whether a process can open the GPUs that it was dealt
host           the machine's boot id, addresses and room for sockets; whether the parent process lives
memory_kills   whether the kernel has killed for lack of memory
proxies        which requests pass a proxy of the environment
text           control characters in the texts of others
threads        work in daemon threads, as futures; the end of a process that was asked to leave and hangs
tls            contexts and checks of certificates
"""
