"""The command samples: what the model writes, what it is paid for it, and what failed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.commands.options import AsJson, Overrides, Targets, print_json
from launcher.errors import LaunchError

if TYPE_CHECKING:
    from launcher.job.remote import RemoteJob
    from schema.wire.messages import GroupKind, SampleRecord
    from schema.wire.sample_file import Order

MOST_STEPS = 20
"""The newest of those that have samples, named where one is asked for that has none."""
SHORT = 1200
"""Characters of a text that are shown; all of it with --full."""


def samples(
    targets: Targets = None,
    set_: Overrides = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Of this step, or of the validation of this version.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest scores.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest scores.")] = False,
    errors: Annotated[bool, typer.Option("--errors", help="Those whose rewards failed, newest first.")] = False,
    validation: Annotated[bool, typer.Option("--validation", help="Only those of validations.")] = False,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="How many.")] = 4,
    full: Annotated[bool, typer.Option("--full", help="Do not cut long texts and tracebacks.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show samples of a running or ended job: prompt, answer, rewards, score, advantage, versions, errors.

    Kept are those of logging.sample_groups groups of each step, all of validations, and all that failed; they are
    the lines of samples/*.jsonl in the run directory. Exit code 1: there is no such sample.

    \b
      cosmos-launch samples                    the newest step of the newest run below ./outputs
      cosmos-launch samples RUN_DIR --worst    the worst of the whole run
      cosmos-launch samples --errors -n 1      the newest failure, with its traceback
      cosmos-launch samples --validation --best --json | jq '.[0].answer'
    """
    from launcher.job import remote

    if best + worst + errors > 1:
        raise LaunchError("--best, --worst and --errors exclude each other", "choose one of them")
    order: Order | None = "best" if best else "worst" if worst else "errors" if errors else None
    target = remote.find(targets or [], set_ or [], os.environ)
    kind: GroupKind | None = "validation" if validation else None if errors else "train"
    records = _find(target, kind, step, order, limit)
    if as_json:
        print_json([record.model_dump(mode="json") for record in records])
    else:
        shown = "\n\n".join(text(record, None if full else SHORT) for record in records)
        typer.echo(shown or _nothing(target, kind, errors))
    raise typer.Exit(0 if records else 1)


def _find(
    target: RemoteJob, kind: GroupKind | None, step: int | None, order: Order | None, limit: int
) -> list[SampleRecord]:
    from schema.wire import sample_file

    if target.run is None:
        from controller.client import calls as api

        return target.ask(api.samples(kind, step, order, limit))
    folder = sample_file.folder_of(target.run.path)
    return sample_file.find(folder, kind=kind, step=step, order=order, limit=limit)


def _nothing(target: RemoteJob, kind: GroupKind | None, errors: bool) -> str:
    from schema.wire import sample_file

    if target.run is not None and not target.run.is_alive() and not (target.run.path / "samples").is_dir():
        return f"{target.name} has kept no samples: logging.sample_groups is 0, no step was trained, or it is old"
    if errors:
        return "no such sample has failed"
    files = sample_file.files(sample_file.folder_of(target.run.path)) if target.run is not None else []
    if steps := [str(step) for kept, step in files if kept == kind]:
        cut = "…, " if len(steps) > MOST_STEPS else ""
        of = "versions" if kind == "validation" else "steps"
        return f"no such sample is kept: there are those of {of} {cut}{', '.join(steps[-MOST_STEPS:])}"
    return "no such sample is kept: they come with the first trained step (logging.sample_groups says how many)"


def text(record: SampleRecord, most: int | None) -> str:
    """One sample for people; its texts cut to `most` characters."""
    from schema.util.text import indented

    where = "validation of version" if record.kind == "validation" else "step"
    head = [f"{where} {record.step}", f"{record.group}/{record.index}", record.ending]
    head += [f"{record.response_tokens} tokens", f"version {_versions(record)}"]
    head += [f"dropped: {record.dropped}"] if record.dropped else []
    paid = [
        f"{name} {value:.4g}" + (f" × {record.weights[name]:g}" if name in record.weights else "")
        for name, value in record.rewards.items()
    ]
    total = "no score" if record.score is None else f"score {record.score:.4g}"
    advantage = "" if record.advantage is None else f", advantage {record.advantage:.3g}"
    lines = ["── " + " · ".join(head)]
    for name, value in (
        ("prompt", record.prompt),
        ("answer", record.answer),
        ("reference", record.reference),
        ("rewards", f"{', '.join(paid) or 'none'}: {total}{advantage}"),
        ("error", record.error or ""),
    ):
        if value:
            lines.append(f"{name:<9} {indented(_cut(value, most))}")
    return "\n".join(lines)


def _versions(record: SampleRecord) -> str:
    if record.oldest_version == record.newest_version:
        return str(record.newest_version)
    return f"{record.oldest_version} to {record.newest_version}"


def _cut(value: str, most: int | None) -> str:
    if most is None or len(value) <= most:
        return value
    return f"{value[: most // 2]}\n… {len(value) - most} characters, shown by --full …\n{value[-most // 2 :]}"
