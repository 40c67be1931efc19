"""One class for each tracker: how its library gets a run. Libraries are imported when they are used.

One more is a class here with `@sink(name, package)`, its name in `logging.logger`, and a test.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from launcher.trackers.tables import AnswerTable


@dataclass(frozen=True, slots=True)
class Run:
    """A run as a tracker shows it. run_id: the same whenever the process starts again for this segment."""

    directory: Path
    project: str
    name: str
    run_id: str
    segment: int
    """How often steps were undone: each time a tracker begins anew."""
    fresh: bool
    """Whether nothing of this segment was sent before."""
    config: Mapping[str, Any]

    @property
    def title(self) -> str:
        return self.name + (f" (rewound {self.segment})" if self.segment else "")


class Sink(Protocol):
    """A tracker that takes numbers and tables. Calls may block and may raise anything."""

    resumes: ClassVar[bool]
    """Whether a run can be gone on with by another process; else that one begins it anew, with all steps."""

    def __init__(self, run: Run) -> None:
        """Open it for a segment of a run."""

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """The metrics of a step, in order. at: Unix time."""

    def show(self, step: int, table: AnswerTable, at: float) -> None:
        """Answers of a step whose metrics were logged, or are logged next. The same table may come twice."""

    def close(self) -> None:
        """Bring everything to where it is kept."""


SINKS: dict[str, type[Sink]] = {}
S = TypeVar("S", bound=Sink)


def sink(name: str) -> Callable[[type[S]], type[S]]:
    """Register a tracker; the module that it needs has its name."""

    def register(kind: type[S]) -> type[S]:
        SINKS[name] = kind
        return kind

    return register


@sink("tensorboard")
class Tensorboard:
    """Event files in `tensorboard/` of the run: `tensorboard --logdir` over a directory of runs compares them.

    It has no tables: they are texts of two dimensions, which its tab TEXT shows as such.
    """

    resumes: ClassVar[bool] = True

    def __init__(self, run: Run) -> None:
        from tensorboard.summary import Writer

        folder = run.directory / "tensorboard"
        if run.fresh:  # what was undone must not be shown
            shutil.rmtree(folder, ignore_errors=True)
        self._writer, self._folder = Writer(str(folder)), str(folder)
        self._texts: Any = None

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, wall_time=at)
        self._writer.flush()

    def show(self, step: int, table: AnswerTable, at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._texts is None:
            self._texts = EventFileWriter(self._folder, filename_suffix=".samples")
        # Cells are Markdown: four spaces in front of each line keep what a model wrote as it is.
        cells = [
            ["" if cell is None else "    " + str(cell).replace("\n", "\n    ") for cell in row] for row in table.rows
        ]
        summary = text_pb(table.name, np.array([table.columns, *cells], dtype=object))
        self._texts.add_event(Event(wall_time=at, step=step, summary=summary))
        self._texts.flush()

    def close(self) -> None:
        self._writer.close()
        if self._texts is not None:
            self._texts.close()


@sink("wandb")
class Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps it in `wandb/` of the run. Its x-axis is the metric `step`."""

    resumes: ClassVar[bool] = True

    def __init__(self, run: Run) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.title,
            id=f"{run.run_id}-{run.segment}" if run.segment else run.run_id,
            group=run.name,
            dir=str(run.directory),
            config=dict(run.config),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, init_timeout=60, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._run.log({**metrics, "step": step, "time": at})

    def show(self, step: int, table: AnswerTable, at: float) -> None:
        import wandb

        shown = wandb.Table(columns=table.columns, data=table.rows, allow_mixed_types=True)
        self._run.log({table.name: shown, "step": step, "time": at})

    def close(self) -> None:
        self._run.finish()


@sink("mlflow")
class Mlflow:
    """MLflow; MLFLOW_TRACKING_URI names the server, else it is a SQLite file in the run."""

    resumes: ClassVar[bool] = True

    def __init__(self, run: Run) -> None:
        import os

        from mlflow.tracking import MlflowClient

        server = os.environ.get("MLFLOW_TRACKING_URI")
        place = None if server else (run.directory / "mlartifacts").absolute().as_uri()
        self._client = MlflowClient(server or f"sqlite:///{run.directory}/mlflow.db")
        existing = self._client.get_experiment_by_name(run.project)
        experiment = (
            self._client.create_experiment(run.project, place) if existing is None else existing.experiment_id
        )
        tag = f"{run.run_id}-{run.segment}"
        runs = self._client.search_runs([experiment], f"tags.cosmos_run = '{tag}'", max_results=1)
        made = runs[0] if runs else self._client.create_run(
            experiment, tags={"cosmos_run": tag}, run_name=run.title
        )  # fmt: skip
        self._id = made.info.run_id

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        rows = [Metric(mlflow_name(name), value, round(at * 1000), step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    def show(self, step: int, table: AnswerTable, at: float) -> None:
        file, folder = f"{table.name}-{step:08d}.json", table.name.partition("/")[0]
        if any(artifact.path == file for artifact in self._client.list_artifacts(self._id, folder)):
            return  # a second time its rows would be appended
        columns = dict(zip(table.columns, map(list, zip(*table.rows, strict=True)), strict=True))
        self._client.log_table(self._id, columns, file)

    def close(self) -> None:
        self._client.set_terminated(self._id)


def mlflow_name(name: str) -> str:
    """The name of a metric by the letters that MLflow takes: a batch with another one is refused whole."""
    return re.sub(r"[^\w/.\- ]", "_", name.replace("@", "_at_"), flags=re.ASCII)


@sink("swanlab")
class Swanlab:
    """SwanLab; SWANLAB_MODE=local or offline keeps it in `swanlog/` of the run."""

    resumes: ClassVar[bool] = False

    def __init__(self, run: Run) -> None:
        import swanlab

        self._module = swanlab
        swanlab.init(
            project=run.project,
            experiment_name=run.title,
            logdir=str(run.directory / "swanlog"),
            config=dict(run.config),
        )

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._module.log(dict(metrics), step=step)

    def show(self, step: int, table: AnswerTable, at: float) -> None:
        shown = self._module.echarts.Table()
        shown.add(table.columns, [["" if cell is None else str(cell) for cell in row] for row in table.rows])
        self._module.log({table.name: shown}, step=step)

    def close(self) -> None:
        self._module.finish()


@sink("trackio")
class Trackio:
    """Trackio: local first; TRACKIO_DIR says where. It identifies runs by their names, so ours has the run's id."""

    resumes: ClassVar[bool] = True

    def __init__(self, run: Run) -> None:
        import trackio

        self._module = trackio
        name = f"{run.title} {run.run_id}"
        trackio.init(project=run.project, name=name, config=dict(run.config), resume="allow")

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._module.log(dict(metrics), step=step)

    def show(self, step: int, table: AnswerTable, at: float) -> None:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        self._module.log({table.name: self._module.Table(columns=table.columns, data=rows)}, step=step)

    def close(self) -> None:
        self._module.finish()
