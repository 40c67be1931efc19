"""The commands plot and dashboard: one run or several, as a picture and in a browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.commands.options import AsJson, print_json
from launcher.errors import LaunchError, NotServingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from schema.wire.event_file import Course
    from schema.wire.messages import SampleRecord

WIDEST = 48
"""Characters of a line of text in the picture."""
MOST_TEXTS = 3
_FRAGMENT = "/#token="


def plot(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN_DIR", help="Runs, alive or dead. Default: the newest.")
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A PNG (also without an ending), PDF or SVG.")
    ] = Path("curves.png"),
    as_json: AsJson = False,
) -> None:
    """Draw reward, held-out score and length over the steps, and what the model wrote before and after.

    Several runs are drawn over each other; then staleness takes the place of the texts. Everything comes from
    events.jsonl and samples/ in the run directory: steps that a rewind has undone are not drawn.

    \b
      cosmos-launch plot                                the newest run below ./outputs
      cosmos-launch plot outputs/a outputs/b -o ab.png  two runs in one picture
    """
    from launcher.job import remote
    from launcher.plan.machine import has_module

    if not has_module("matplotlib"):
        raise LaunchError("the package matplotlib is not installed", "pip install matplotlib")
    chosen = [remote.run_below(path, named=bool(runs)).path for path in runs or [Path(remote.DEFAULT_OUTPUT)]]
    curves_of_runs = [PlottedCurves.read(path) for path in chosen]
    empty = next((curves for curves in curves_of_runs if not curves.course.steps), None)
    if empty is not None:
        raise LaunchError(f"{empty.path} has no step to draw", "wait until the first one is trained")
    try:
        output = output if output.suffix else output.with_name(f"{output.name}.png")
        draw(curves_of_runs, output)
    except ValueError as error:  # of matplotlib, about the file's ending
        raise LaunchError(f"{output} cannot be drawn: {error}", "choose an ending like .png") from None
    if as_json:
        print_json({"picture": str(output), "runs": [str(path) for path in chosen]})
    else:
        typer.echo(f"{output}: {', '.join(curves.name for curves in curves_of_runs)}")


def dashboard(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN_DIR", help="Runs, alive or dead. Default: the newest.")
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print a link to the dashboard: a page with curves, samples, timeline, configuration and logs.

    Of a job that runs, its controller serves it, with buttons. Of runs that are dead, and of several at once, this
    command does, from their directories, until Ctrl-C. The link holds a token: whoever has it can look, and operate.

    \b
      cosmos-launch dashboard                        the newest run below ./outputs
      cosmos-launch dashboard outputs/a outputs/b    two runs over each other
    """
    from controller.client import calls as api
    from launcher.job import remote
    from launcher.plan.credentials import without_secrets

    chosen = [remote.run_below(path, named=bool(runs)) for path in runs or [Path(remote.DEFAULT_OUTPUT)]]
    target = remote.RemoteJob(chosen[0], token=chosen[0].read_token() or "")
    live = target.address() if len(chosen) == 1 else ""

    def show(link: str) -> None:
        facts = {"link": link, "token": link.partition(_FRAGMENT)[2], "runs": [str(run.path) for run in chosen]}
        typer.echo(json.dumps(facts) if as_json else link)

    if live and target.token:
        with suppress(NotServingError):
            target.ask(api.ready())  # a browser demands no proof of what gets the token
        show(f"{live}{_FRAGMENT}{target.token}")
        return
    command = [sys.executable, "-P", "-m", "controller.dashboard", "--port", str(port)]
    command += [str(run.path) for run in chosen]
    pipe = subprocess.PIPE if as_json else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    environment = without_secrets(os.environ)
    with subprocess.Popen(command, env=environment, stdout=pipe, encoding="utf-8") as serving:
        try:
            for line in serving.stdout or ():
                if _FRAGMENT in line:
                    show(line.strip())
            serving.wait()
        except KeyboardInterrupt:  # not everybody's Ctrl-C reaches what serves
            serving.terminate()
            return
    raise typer.Exit(serving.returncode)


@dataclass(frozen=True, slots=True)
class PlottedCurves:
    """The part of one run that is drawn."""

    path: Path
    config: dict[str, Any]
    launcher: dict[str, Any]
    course: Course
    seconds: float

    @classmethod
    def read(cls, path: Path) -> PlottedCurves:
        from launcher.plan.rundir import RunDir
        from schema.wire import event_file

        run = RunDir(path)
        course = event_file.course(event_file.read(event_file.path_of(path)))
        if not course.steps:  # a run of a version that wrote no events
            course = event_file.Course.from_records(run.summary() or {})
        launcher = run.launcher()
        now = sum(float(launcher.get(name, 0.0)) * sign for name, sign in (("seen_at", 1), ("started_at", -1)))
        seconds = run.earlier()["elapsed_s"] + now
        return cls(path, run.written_config() or {}, launcher, course, seconds)

    @property
    def name(self) -> str:
        return (self.config.get("logging") or {}).get("experiment_name") or self.path.name

    def title(self) -> str:
        """Model, cores and time."""
        from launcher.display.view import duration

        model = str((self.config.get("policy") or {}).get("model_name_or_path", "a model"))
        parts = ["/".join(model.rstrip("/").split("/")[-2:])]
        parts += [f"{self.launcher['cores']} cores"] if self.launcher.get("cores") else []
        return ", ".join([*parts, duration(self.seconds)])

    def metric(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric; NaN where it was not reported, so that the curve has a gap there."""
        steps = self.course.steps
        return [record.step for record in steps], [record.metrics.get(name, float("nan")) for record in steps]

    def highest_reward(self) -> float | None:
        """The sum of the weights, where each reward is known to be one at most."""
        from schema.config import BUILTIN_REWARDS
        from schema.config.base import reward_weights

        policy = (self.config.get("train") or {}).get("train_policy") or {}
        weights = reward_weights(policy.get("reward_function") or {})
        if not weights or not weights.keys() <= BUILTIN_REWARDS.keys():
            return None
        return sum(weight for weight in weights.values() if weight > 0)

    def before_and_after(self) -> Iterator[tuple[SampleRecord, SampleRecord]]:
        """Samples of the first validation, each with that of the last one for the same prompt."""
        from schema.wire import sample_file

        folder = sample_file.folder_of(self.path)
        versions = [step for kind, step in sample_file.files(folder) if kind == "validation"]
        find = partial(sample_file.find, folder, kind="validation", limit=sys.maxsize)
        first, last = find(step=min(versions, default=0)), find()
        if not last or last[0].step == versions[0]:
            return
        later = {record.prompt: record for record in last}
        yield from ((record, later[record.prompt]) for record in first if record.prompt in later)


def draw(runs: list[PlottedCurves], output: Path) -> None:
    """Draw the picture. Raises OSError, and ValueError for an ending that matplotlib does not have."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    reward, held_out, length, last = axes.flat
    for number, run in enumerate(runs):
        color = f"C{number}"
        label = run.name if len(runs) > 1 else None
        reward.plot(*run.metric("reward_mean"), color=color, label=label)
        if (highest := run.highest_reward()) is not None and len(runs) == 1:
            reward.axhline(highest, color="black", linestyle=":", linewidth=1)
            reward.annotate(f"highest {highest:g}", (0, highest), (2, -10), textcoords="offset points", fontsize=8)
        length.plot(*run.metric("response_tokens_mean"), color=color)
        _held_out(held_out, run, color, labelled=len(runs) == 1)
    records = [record for run in runs for record in run.course.validations]
    losses = any(record.loss is not None for record in records)
    if not losses and all(0 <= r.score_mean <= 1 for r in records if r.score_mean is not None):
        held_out.set_ylim(0, 1.05)
        held_out.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axis, title in (
        (reward, "reward (mean of the batch)"), (held_out, f"held-out {'loss' if losses else 'score'}"),
        (length, "length of answers (tokens)"),
    ):  # fmt: skip
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("training step", fontsize=9)
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        reward.legend(fontsize=8)
    pairs = list(runs[0].before_and_after()) if len(runs) == 1 else []
    _texts(last, pairs) if pairs else _staleness(last, runs)
    figure.suptitle("\n".join(run.title() for run in runs) if len(runs) == 1 else f"{len(runs)} runs", fontsize=12)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # what models write is in no font as a whole
        figure.savefig(output, dpi=120)
    plt.close(figure)


def _held_out(axis: Axes, run: PlottedCurves, color: str, *, labelled: bool) -> None:
    scores = [(record.version, record.value) for record in run.course.validations]
    points = [(version, score) for version, score in scores if score is not None]
    percent = all(record.loss is None for record in run.course.validations)
    axis.plot([version for version, _ in points], [score for _, score in points], marker="o", color=color)
    for version, score in points if labelled else []:
        axis.annotate(
            f"{score:.0%}" if percent and 0 <= score <= 1 else f"{score:.3g}", (version, score), (0, -16),
            textcoords="offset points", ha="center", fontsize=8,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        )  # fmt: skip


def _texts(axis: Axes, pairs: list[tuple[SampleRecord, SampleRecord]]) -> None:
    """Show answers from before and after, the prompts first whose answers have become better."""
    axis.axis("off")
    axis.set_title("before → after", fontsize=11)
    better = sorted(pairs, key=lambda pair: (pair[0].score or 0.0) - (pair[1].score or 0.0))
    lines = []
    for before, after in better[:MOST_TEXTS]:
        lines += [f"▶ {_short(before.prompt, 1)}", f"   before: {_short(before.answer, 2)}"]
        lines += [f"   after:  {_short(after.answer, 2)}", ""]
    axis.text(0, 0.98, "\n".join(lines), va="top", family="monospace", fontsize=7, parse_math=False)


def _short(text: str, lines: int) -> str:
    from schema.util.text import one_line

    wrapped = textwrap.wrap(one_line(text.strip()), WIDEST, max_lines=lines, placeholder=" …")
    return "\n           ".join(wrapped)


def _staleness(axis: Axes, runs: list[PlottedCurves]) -> None:
    for number, run in enumerate(runs):
        axis.plot(*run.metric("staleness_mean"), color=f"C{number}")
    axis.set_title("staleness of trained samples (steps)", fontsize=11)
    axis.set_xlabel("training step", fontsize=9)
    axis.grid(alpha=0.3)
