"""`python -m tests.images`: the commands of the Dockerfiles, run in a clean Debian of a folder of its own.

builder      FROM, COPY, RUN, ENV, ARG and USER of a Dockerfile, without a daemon
"""
