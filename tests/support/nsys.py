"""A stand-in for Nsight Systems on the PATH, where the real one cannot be installed.

    with_nsys(directory)   an executable `nsys` there; the PATH that finds it

It knows the options of `nsys profile` that we use, in the form `--name=value`, and refuses all others; it starts the
program below a process of its own, waits for it, writes `<output>.nsys-rep` and exits with the program's code. A
report that is there is not overwritten. SIGTERM ends it without a report, the worst that the real one may do.

With NSYS_GATE_AT = "start" or "report" it makes the file `starting` or `writing` at that point, next to the file that
NSYS_GATE names, and goes on when that one is there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PROGRAM = """#!{python} -IS
import os, sys, time

VALUES = {{
    "--trace": {{"cuda", "nvtx", "osrt", "none"}}, "--sample": {{"none", "cpu", "process-tree", "system-wide"}},
    "--cpuctxsw": {{"none", "process-tree", "system-wide"}}, "--wait": {{"primary", "all"}},
    "--force-overwrite": {{"true", "false"}}, "--output": None,
}}
def stop_at(point):
    gate = os.environ.get("NSYS_GATE")
    if gate:
        open(os.path.join(os.path.dirname(gate), point), "w").close()
    while gate and not os.path.exists(gate):
        time.sleep(0.01)

command, *arguments = sys.argv[1:]
if command != "profile":
    sys.exit("unknown command " + command)
found = {{}}
while arguments and arguments[0].startswith("-"):
    name, _, value = arguments.pop(0).partition("=")
    if name not in VALUES:
        sys.exit("unrecognised option " + name)
    if VALUES[name] is not None and not set(value.split(",")) <= VALUES[name]:
        sys.exit("illegal value of " + name + ": " + value)
    found[name] = value
report = found["--output"].replace("%%", "%") + ".nsys-rep"
between, send = os.pipe()
child = os.fork()
if child == 0:  # as the real one does, not its own child but one below
    if os.environ.get("NSYS_GATE_AT") == "start":
        stop_at("starting")
    worker = os.fork()
    if worker == 0:
        os.execvp(arguments[0], arguments)
    _, status = os.waitpid(worker, 0)
    os.write(send, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)
os.waitpid(child, 0)
code = int(os.read(between, 16))
if os.environ.get("NSYS_GATE_AT") == "report":
    stop_at("writing")
if os.path.exists(report) and found.get("--force-overwrite") != "true":
    sys.exit(report + " exists")
with open(report, "w") as file:
    file.write(" ".join(sys.argv[1:]))
sys.exit(128 - code if code < 0 else code)
"""


def with_nsys(directory: Path) -> str:
    """A PATH on which the stand-in is found first."""
    directory.mkdir(exist_ok=True)
    program = directory / "nsys"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"
