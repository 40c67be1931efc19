"""Control characters: refused or made visible in each message that a replica sends, and at each output."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from rich.console import Console

import schema.wire.messages.recovery  # noqa: F401 - its messages are looked at
from launcher.commands.status import lines, why_lines
from launcher.display.screen import Screen, TerminalScreen
from launcher.display.summary import rows, table
from launcher.display.view import View, line, panel
from launcher.errors import LaunchError
from launcher.processes.logs import tail
from schema.util.text import PLAIN, LogFormatter, indented, one_line, visible
from schema.wire import messages as m
from schema.wire.batch import StepTable
from schema.wire.sample import SampleHeader
from schema.wire.weights import Offer, Publication
from tests.launcher.samples import job_status

EVIL = '\x1b]0;x\x07\n12:00:00 [red]finished[/] " phase=finished \x9b31m\u202e\r\u2028[link=http://x]y\x7f'
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

FROM_CONTROLLER = {
    "Problem", "CommitReply", "CheckpointReply", "RegisterReply", "HeartbeatReply", "DrainReply", "LeaseReply",
    "LeasedGroup", "PushResult", "PushReply", "ReleaseReply", "ReplicaInfo", "StepRecord", "ValidationRecord",
    "Alarm", "RewardStatus", "LedgerStatus", "JobStatus", "PublishReply", "ReplicaUpdate", "PublicationInfo",
    "SourceStatus", "RowsFile",
    "WeightsStatus", "DeclareReply", "DeclaredLeases", "ShownRun", "SessionReply", "Overview", "Curve", "Curves",
    "Span", "Lane", "Mark", "Fault", "Timeline", "LogFile", "LogText", "KeptSamples",
    "MemberReply", "MemberStatus", "MembersStatus", "Estimate", "SourceScores",
}  # fmt: skip
"""What nobody but the controller sends; it may quote others, which outputs make visible."""
PROSE = {
    *(("ProfileStatus", "detail"), ("ProfileStatus", "directory")),
    *(("HeartbeatRequest", "trouble"), ("UpdateReport", "detail"), ("SampleHeader", "error")),
    ("SampleRecord", "error"),
    # What models write is kept as it is, and made visible where it is shown.
    *(
        (kind, name)
        for kind in ("SampleText", "SampleRecord")
        for name in ("prompt", "answer", "reference", "pieces")
    ),
}

NUMBERS = {("LedgerSnapshot", "staleness key")}
"""Keys that are integers: JSON schema does not say so."""


def subclasses(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


SENT = [
    *(kind for kind in subclasses(m.Message) if kind.__module__.startswith("schema.wire")
      and kind.__name__ not in FROM_CONTROLLER),
    SampleHeader, StepTable, Publication, Offer,
]  # fmt: skip


def texts(node: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and pattern of each text of a JSON schema, keys of tables too; an empty pattern: anything goes."""
    if isinstance(node, list):
        for one in node:
            yield from texts(one, path)
    if not isinstance(node, dict):
        return
    if node.get("type") == "string" and not {"enum", "const"} & node.keys():
        yield path, node.get("pattern", "")
    if node.get("additionalProperties") not in (None, False):
        keys = node.get("propertyNames", {})
        yield f"{path} key", keys.get("pattern", "")
    for pattern, inner in node.get("patternProperties", {}).items():
        yield f"{path} key", pattern
        yield from texts(inner, path)
    for name, inner in node.get("properties", {}).items():
        yield from texts(inner, f"{path}.{name}".lstrip("."))
    for name in ("items", "anyOf", "additionalProperties"):
        yield from texts(node.get(name), path)


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_no_field_of_a_message_takes_control_characters(kind: type[BaseModel]) -> None:
    document = kind.model_json_schema()  # what it refers to is another message of the list
    free = {
        (kind.__name__, path)
        for path, pattern in texts(document)
        if not pattern
        or any(re.search(pattern.replace("$", r"\Z"), f"a{control}") for control in "\x1b\x07\n\x9b\u202e")
    }
    assert free == {found for found in PROSE | NUMBERS if found[0] == kind.__name__}


def test_every_nested_message_is_looked_at() -> None:
    names = {kind.__name__ for kind in SENT}
    for kind in SENT:
        assert not {
            name
            for name, node in kind.model_json_schema().get("$defs", {}).items()
            if name not in names and node.get("type") == "object"
        }


def test_a_field_that_is_refused_is_named() -> None:
    with pytest.raises(ValidationError, match="engine"):
        m.RegisterRequest(request_id="12345678", role="rollout", name="r", engine="v\x1b[31m")


def test_errors_with_colours_are_taken_and_arrive_visible() -> None:
    colours = "\x1b[31mValueError\x1b[0m: \x1b]0;x\x07\n  in f\n"
    beat = m.HeartbeatRequest(incarnation=1, trouble=colours)
    assert beat.trouble == "ValueError: ␛]0;x␇\n  in f\n"
    long = "\x07" * 4096
    again = m.HeartbeatRequest.model_validate_json(m.HeartbeatRequest(incarnation=1, trouble=long).model_dump_json())
    assert again.trouble == "␇" * 4096, "nothing gets longer on its way"
    raw = '{"incarnation": 1, "trouble": "\\u001b]0;x\\u0007"}'
    assert m.HeartbeatRequest.model_validate_json(raw).trouble == "␛]0;x␇"


def test_what_is_visible_stays_as_it_is() -> None:
    for text in ("plain", "Grüße\n\t│ 日本語 🙂", "العربية", visible(EVIL)):
        assert visible(text) == text
    assert visible("name\udc80") == "name\ufffd", "of a file; it could not be sent"
    assert one_line("a\nb\tc") == "a␤b c"
    assert indented("a\nb") == "a\n    b"


def on_terminal(draw: Callable[[TerminalScreen], None]) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    draw(TerminalScreen(console))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def shown_panel() -> str:
    view = View(status=job_status(last_error=EVIL, name=EVIL), notice=EVIL, refusal=EVIL, stage=EVIL)
    return on_terminal(lambda screen: screen._console.print(panel(view)))


def surveyed() -> str:
    fields: dict[str, Any] = dict.fromkeys(("checkpoint", "summary", "next", "status", "ledger", "replicas"))
    end = {"at": 1.0, "process": "r", "code": 1, "what": EVIL, "log": "l", "lines": [EVIL]}
    found = {**fields, "state": "waiting", "run_dir": "/r", "alive": True, "error": EVIL, "leaving": []}
    faults = [{"kind": EVIL, "count": 2}]
    history = {"steps": [], "validations": [], "job": {"text": EVIL}, "alarms": {"a": EVIL}, "faults": faults}
    found |= {"launcher": {"pid": 1, "ends": [end], "redis": ""}, "history": history}
    return "\n".join(lines(found, now=2.0) + why_lines(found))


SUMMARY = {"outcome": "failed", "reason": EVIL, "elapsed_s": 1.0, "run_dir": "/r"}


def formatted(error: Exception | None = None) -> str:
    info = None if error is None else (type(error), error, None)
    record = logging.LogRecord("controller", logging.WARNING, "", 0, "trouble: %s", (EVIL,), info)
    return LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s").format(record)


def logged(tmp_path: Path) -> str:
    (tmp_path / "x.log").write_text(EVIL)
    return "\n".join(tail(tmp_path / "x.log"))


@pytest.mark.parametrize(
    "output",
    [
        lambda: line(View(status=job_status(last_error=EVIL), notice=EVIL, refusal=EVIL)),
        lambda: line(View(stage=EVIL)),
        shown_panel,
        surveyed,
        lambda: "\n".join(value for _, value in rows(SUMMARY)),
        lambda: on_terminal(lambda screen: screen._console.print(table(SUMMARY))),
        lambda: on_terminal(lambda screen: screen.event(EVIL)),
        lambda: LaunchError(EVIL, EVIL).render(),
        formatted,
    ],
)  # fmt: skip
def test_no_output_writes_them_as_they_are(output: Callable[[], str]) -> None:
    text = output()
    assert not CONTROL.search(text), ascii(text)
    assert not re.search(r"(?m)^12:00:00", text), "a forged line"


def test_markup_is_shown_and_not_obeyed() -> None:
    for text in (shown_panel(), on_terminal(lambda screen: screen.event(EVIL))):
        assert "[red]finished[/]" in text
        assert "[link=http://x]y" in text


def test_plain_screens_and_logs_of_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Screen().event(EVIL)
    out = capsys.readouterr().out
    assert not CONTROL.search(out)
    assert "\n12:00:00 [red]" not in out
    assert not CONTROL.search(logged(tmp_path))
    assert not CONTROL.search(formatted(ValueError(EVIL)))


def test_a_value_of_the_status_line_ends_where_its_quotes_do() -> None:
    assert line(View(status=job_status(last_error=EVIL))).count('"') == 2
    assert re.match(PLAIN, "rollout-0")
