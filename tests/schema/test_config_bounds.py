"""Sizes, files and texts beyond reason end in a few problems: nothing hangs, nothing fills memory or the screen."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from schema.config import ConfigError, Problem, load_config
from schema.config.columns import UnreadableDataError, columns_of
from schema.config.model_facts import BrokenModelError, read_config
from schema.config.reading.tomlread import MAX_FILE_BYTES
from schema.config.rules.reward import reward_problems
from schema.interop import convert
from schema.tls import TlsFileError, client_context


def only(error: pytest.ExceptionInfo[ConfigError]) -> Problem:
    (problem,) = error.value.problems
    return problem


# ---- files ------------------------------------------------------------------------------------------------


def a_directory(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda path: path.symlink_to("/dev/null"), "a device, not a file", "write it to a file first"),
        (
            lambda path: path.write_bytes(b"#" * (MAX_FILE_BYTES + 1)),
            "larger than 1048576 bytes",
            "right file?",
        ),
        (a_directory, "Is a directory", "give the path of a"),
        (a_socket, "cannot be read", ""),
        (lambda path: path.symlink_to(path.name), "symbolic links", ""),
        (
            lambda path: path.write_bytes(b"a = '\xff'"),
            "not a text in UTF-8 (byte 5)",
            "save the file as UTF-8",
        ),
        (lambda path: path.write_bytes(b"a = '\0'"), "", ""),
    ],
)
@pytest.mark.parametrize("read", [load_config, convert])
def test_what_is_not_a_file_of_text(tmp_path, monkeypatch, make, message, hint, read) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run.toml")
    with pytest.raises(ConfigError) as error:
        read("run.toml")
    assert message in only(error).message
    assert hint in only(error).hint
    assert only(error).message.count("run.toml") == 0, "the file stands before the message already"


def test_what_a_job_names_is_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "reward.py", "tls.pem", "config.json"):
        Path(name).symlink_to("/dev/null")
    with pytest.raises(UnreadableDataError, match="is a pipe or a device"):
        columns_of(Path("rows.jsonl"), (), ())
    (problem,) = reward_problems("reward", "reward.py:f", {"reward.py:f": 1.0})
    assert "a device, not a file" in problem.message
    with pytest.raises(TlsFileError, match="not a file"):
        client_context("tls.pem")
    with pytest.raises(BrokenModelError, match="a device, not a file"):
        read_config(Path("config.json"))
