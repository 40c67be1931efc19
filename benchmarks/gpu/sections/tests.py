"""The fast tests of trainer, weights and embedded engine on one rank, on the device that the code picks by itself.

Those of several ranks are left out: with fewer GPUs than ranks they compute on the CPU, which proves nothing here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.harness import ROOT

FOLDERS = ("tests/policy_worker", "tests/weight_sync", "tests/rollout_worker/engines")
TINY = ("tests/weight_sync/test_lora.py", "tests/policy_worker/trained/test_lr_schedule.py")
RANKS_FILES = ("ranks", "mesh", "meshes", "optimizer_ranks", "context", "lora", "memory")
SEVERAL_RANKS = (
    "tests/policy_worker/replicas",
    *(f"tests/policy_worker/parallel/test_{name}.py" for name in RANKS_FILES),
    "tests/policy_worker/test_export_command.py",
    "tests/weight_sync/publishing/test_gather.py",
)
WORKERS = 8
NAMED = 12
HANGS = 40
"""Seconds after which a test counts as hanging, so that the others are heard of."""
LEFT_OUT = "not s3 and not bucket"
"""Tests against a server that speaks S3: a machine made for PyTorch has neither boto3 nor moto."""


def run(bench: Bench) -> None:
    workers = [] if bench.tiny else ["-n", str(min(WORKERS, os.cpu_count() or 1))]
    options = (*workers, "-m", "not slow and not e2e and not soak", "-k", LEFT_OUT, "--timeout", str(HANGS))
    options = (*options, *(f"--ignore={path}" for path in SEVERAL_RANKS))
    passes(bench, "all pass", *(TINY if bench.tiny else FOLDERS), *options)


def passes(bench: Bench, name: str, *arguments: str) -> None:
    """A row for a run of pytest with these arguments, with the properties that tests report, and one for each test
    that has failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}", "-v", "--maxfail", "40"]
        began = time.monotonic()
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(command, cwd=ROOT, check=False, env=env).returncode
        seconds = time.monotonic() - began
        if not report.exists():
            bench.row("pytest", "failed", why=f"exit code {code}")
            return
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))  # written by our own pytest
    failed = [
        f"{case.get('classname')}.{case.get('name')}: {_reason(case)}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    reported = {str(entry.get("name")): entry.get("value") for entry in suite.iter("property")}
    bench.check(
        name,
        not failed,
        passed=int(suite.get("tests", 0)) - len(failed) - int(suite.get("skipped", 0)),
        failed=len(failed),
        skipped=int(suite.get("skipped", 0)),
        seconds_s=seconds,
        **reported,
    )
    for text in failed[:NAMED]:
        bench.row(text[:400], "failed")


def _reason(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return (found.get("message") or "").splitlines()[0][:200] if found.get("message") else kind
    return ""
