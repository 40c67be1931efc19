"""Nothing that comes from a file, a process or the network is ever run: no pickle, no eval, no shell.

A place that must do something of the kind would stand in `ALLOWED`, with its reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import cosmos_launch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (*cosmos_launch.PACKAGES, "examples", "benchmarks")

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "telnetlib", "pty"}
CALLS = {
    "eval": "runs text",
    "exec": "runs text",
    "os.system": "a shell",
    "os.popen": "a shell",
    "subprocess.getoutput": "a shell",
    "subprocess.getstatusoutput": "a shell",
    "asyncio.create_subprocess_shell": "a shell",
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "yaml.load": "makes objects: safe_load, or a loader derived from SafeLoader",
    "yaml.unsafe_load": "makes objects",
    "yaml.full_load": "makes objects",
    "tempfile.mktemp": "somebody else may make the file first",
    "ssl._create_unverified_context": "believes everybody",
}
CALLS |= dict.fromkeys(
    ("dist.broadcast_object_list", "dist.all_gather_object", "dist.gather_object", "dist.scatter_object_list",
     "dist.recv_object_list"),
    "unpickles what peers send",
)  # fmt: skip
KEYWORDS = {
    "shell": (True, "a shell"),
    "allow_pickle": (True, "unpickles"),
    "verify": (False, "believes everybody"),
    "check_hostname": (False, "believes everybody"),
    "weights_only": (False, "unpickles"),
}
ALLOWED: dict[tuple[str, str], str] = {}
"""(file, what): why. Empty, and better so."""


SUSPECT = re.compile(
    "|".join(
        [
            *(rf"\b{name}\b" for name in (*MODULES, "CERT_NONE")),
            *(rf"\b{name.replace('.', '[^a-zA-Z0-9]+')}\b" for name in CALLS),
            *(rf"\b{name}[^a-zA-Z0-9]+{value}\b" for name, (value, _) in KEYWORDS.items()),
        ]
    )
)
"""What a file must hold for the search to find something in it: most hold nothing of it and need no parsing."""


@cache
def suspects() -> list[tuple[str, ast.Module]]:
    """The files that may do something of the kind, parsed."""
    texts = {
        path: path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }
    assert len(texts) > 300
    return [(str(path.relative_to(ROOT)), ast.parse(text)) for path, text in texts.items() if SUSPECT.search(text)]


def name_of(node: ast.expr) -> str:
    """A dotted name as it is written, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = name_of(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def findings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, what, why."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = [alias.name for alias in node.names]
            for name in imported if isinstance(node, ast.Import) else [node.module or ""]:
                if name.partition(".")[0] in MODULES:
                    yield node.lineno, name, "makes objects of what it reads"
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            short = ".".join(name.split(".")[-2:])
            if short in CALLS:
                yield node.lineno, short, CALLS[short]
            for keyword in node.keywords:
                value, why = KEYWORDS.get(keyword.arg or "", (None, ""))
                if isinstance(keyword.value, ast.Constant) and why and keyword.value.value is value:
                    yield node.lineno, f"{keyword.arg}={value}", why
        elif isinstance(node, ast.Attribute) and node.attr == "CERT_NONE":
            yield node.lineno, "CERT_NONE", "believes everybody"


def test_nothing_foreign_is_run() -> None:
    wrong = [
        f"{path}:{line}: {what} ({why})"
        for path, tree in suspects()
        for line, what, why in findings(tree)
        if (path, what) not in ALLOWED
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import pickle", "pickle"), ("from cloudpickle import loads", "cloudpickle"), ("eval(text)", "eval"),
        ("subprocess.run('x', shell=True)", "shell=True"), ("import os\nos.system(x)", "os.system"),
        ("torch.load(path)", "torch.load"), ("numpy.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("torch.distributed.dist.all_gather_object(a, b)", "dist.all_gather_object"),
        ("httpx.Client(verify=False)", "verify=False"), ("context.verify_mode = ssl.CERT_NONE", "CERT_NONE"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.load"),
    ],
)  # fmt: skip
def test_the_search_finds_what_it_is_for(code: str, what: str) -> None:
    assert SUSPECT.search(code)
    assert what in [found for _, found, _ in findings(ast.parse(code))]


def test_nothing_is_allowed_that_is_not_there() -> None:
    there = {(path, what) for path, tree in suspects() for _, what, _ in findings(tree)}
    assert set(ALLOWED) <= there
