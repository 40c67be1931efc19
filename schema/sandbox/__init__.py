"""Programs that are not trusted, run where they can change and reach nothing.

bubblewrap   a read-only root of chosen files, empty writable directories, no network, bounded time and memory
"""
