"""The view gathers what the dashboard shows of a run directory, whether the run is alive or dead.

    events.jsonl ─▶ History (folded, bounded; read on from where it ended) ─▶ timeline, faults, validations, scaling
    StepLog      ─▶ curves: of a live run the controller's own, of a dead one read from the same file
    samples/, logs/, config.json, origins.json ─▶ as they are

Reading is done in threads, one at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from controller.dashboard.scaling import ScaleHistory, ScaleSettings
from controller.errors import ApiError
from controller.state.step_log import StepLog
from schema.config.secrets import cut, masked
from schema.util.text import visible
from schema.wire import event_file, sample_file
from schema.wire.messages import ErrorCode, Event, EventKind, SampleRecord, StepRecord
from schema.wire.messages import dashboard as d

R = TypeVar("R")
Point = tuple[int, float | None]

VALIDATION, VALIDATION_LOSS = "validation", "validation_loss"
"""The metric of the curve of held-out scores, by weight version."""
SOURCES = "validation/source/"
"""The beginning of the metrics of validation sets and data sources; as a metric it asks for all of them."""
MOST_SOURCES = 32
MOST_SPANS, MOST_MARKS, MOST_MOMENTS = 2000, 500, 2000
MOST_KEPT = 1000
"""Steps whose samples are listed."""
MOST_LOG = 256 * 1024
"""Bytes of a log that are shown at once."""
STEP_LINE = b'"kind":"step"'
"""Where an event says of which kind it is: in its first bytes."""


class EventHistory:
    """Events of a run folded into what is shown of them, bounded however many there are. Pure."""

    def __init__(self) -> None:
        self.newest, self.ended = 0, 0.0
        self.began: float | None = None
        self._lanes: dict[str, d.Lane] = {}
        self._marks: deque[d.Mark] = deque(maxlen=MOST_MARKS)
        self._publications = Moments()
        self.version = -1
        """The newest that was published."""
        self.validations: dict[int, float | None] = {}
        """Score by version."""
        self.sources: dict[str, dict[int, float | None]] = {}
        """Mean score of each validation set or data source by version, by the names that trackers show."""
        self.losses: dict[int, float] = {}
        """Loss on held-out conversations by version."""
        self.health = event_file.Health()
        self.scaling = ScaleHistory()

    def add(self, event: Event) -> None:
        data, kind = event.data, event.kind
        self.newest, self.ended = event.id, event.at
        self.began = event.at if self.began is None else self.began
        self.health.add(event)
        if kind is EventKind.REPLICA:
            self._replica(event)
            self.scaling.replica(event)
        elif kind is EventKind.PUBLICATION:
            self.version = int(data["version"])
            self._publications.add(event.at, self.version)
        elif kind is EventKind.VALIDATION:
            version, score, loss = int(data["version"]), data.get("score_mean"), data.get("loss")
            if loss is not None:
                self.losses[version] = float(loss)
            if loss is None or data.get("scores") is not None:
                self.validations[version] = None if score is None else float(score)
                self._sources(version, data.get("sources", {}))
        elif kind is EventKind.SCALE:
            self.scaling.scale(event)
            if data["desired"] != data["before"]:
                self._mark(event)
        elif kind not in (EventKind.DROP, EventKind.REWARD, EventKind.STEP):
            self._mark(event)
        if kind is EventKind.REWIND:
            self.validations = {v: score for v, score in self.validations.items() if v <= data["step"]}
            self.losses = {v: loss for v, loss in self.losses.items() if v <= data["step"]}
            kept = {name: {v: s for v, s in of.items() if v <= data["step"]} for name, of in self.sources.items()}
            self.sources = {name: scores for name, scores in kept.items() if scores}

    def _sources(self, version: int, sources: dict[str, Any]) -> None:
        """Note the scores of several sources; of a single one they are those of all."""
        for name, scores in sources.items() if len(sources) > 1 else ():
            curve, mean = f"{SOURCES}{name}/mean@{int(scores['n'])}", scores["mean"]
            if curve in self.sources or len(self.sources) < MOST_SOURCES:
                self.sources.setdefault(curve, {})[version] = None if mean is None else float(mean["value"])

    def _mark(self, event: Event) -> None:
        self._marks.append(d.Mark(at=event.at, kind=str(event.kind), text=event.text))

    def _replica(self, event: Event) -> None:
        data = event.data
        name, ranks = str(data["name"]), int(data.get("ranks", 1))
        spans = self._lanes[name].spans if name in self._lanes else []
        span = d.Span(at=event.at, state=str(data["state"]), replica_id=data["replica_id"], text=event.text)
        self._lanes[name] = d.Lane(name=name, role=data["role"], ranks=ranks, spans=[*spans, span])
        if sum(len(lane.spans) for lane in self._lanes.values()) > MOST_SPANS:
            longest = max(self._lanes.values(), key=lambda lane: len(lane.spans))
            del longest.spans[0]
            if not longest.spans:
                del self._lanes[longest.name]

    def replicas(self) -> list[dict[str, Any]]:
        """Return as much of a `ReplicaInfo` of each as there is: its last known state."""
        return [
            {"name": name, "role": lane.role, **lane.spans[-1].model_dump(include={"replica_id", "state"})}
            for name, lane in sorted(self._lanes.items())
        ]

    def timeline(self, steps: StepLog, now: float | None) -> d.Timeline:
        moments = Moments()
        for step, at in steps.curve("at"):
            moments.add(at or 0.0, step)
        return d.Timeline(
            lanes=[lane.model_copy(update={"spans": list(lane.spans)}) for _, lane in sorted(self._lanes.items())],
            marks=list(self._marks),
            publications=self._publications.kept,
            steps=moments.kept,
            faults=sorted(self.health.faults.values(), key=lambda fault: -fault.count),
            began=self.began,
            ended=self.ended or None,
            now=now,
        )


class Moments:
    """Moments, evenly thinned: one in 2^k."""

    def __init__(self) -> None:
        self.kept: list[tuple[float, int]] = []
        self._every, self._seen = 1, 0

    def add(self, at: float, number: int) -> None:
        if self._seen % self._every == 0:
            self.kept.append((at, number))
        self._seen += 1
        if len(self.kept) > MOST_MOMENTS:
            self.kept, self._every = self.kept[::2], self._every * 2


def thin(points: Sequence[Point], most: int) -> d.Curve:
    """At most `most` points (and the last one): of each stretch the smallest and the largest value.

    A stretch without any value is one gap. Infinite values are gaps.
    """
    sound = [(step, value if value is not None and math.isfinite(value) else None) for step, value in points]
    chosen: list[Point] = sound
    if len(sound) > most:
        stretch, chosen = math.ceil(2 * len(sound) / most), []
        for start in range(0, len(sound), stretch):
            part = sound[start : start + stretch]
            known = [(value, step) for step, value in part if value is not None]
            ends = sorted({(step, value) for value, step in (min(known), max(known))}) if known else part[:1]
            chosen += ends
        if chosen[-1] != sound[-1]:
            chosen.append(sound[-1])
    return d.Curve(steps=[step for step, _ in chosen], values=[value for _, value in chosen])


class _Steps:
    """Gives a log the steps of events; of a metric without a value there is none."""

    def __init__(self, log: StepLog) -> None:
        self._log = log

    def add(self, event: Event) -> None:
        data = event.data
        if event.kind is EventKind.STEP:
            metrics = {name: value for name, value in data["metrics"].items() if value is not None}
            record = StepRecord(step=data["step"], at=data["at"], metrics=metrics)
            samples, tokens = int(data.get("samples", 0)), int(data.get("tokens", 0))
            self._log.rewind(record.step)
            self._log.add(record, samples, tokens)
        elif event.kind is EventKind.REWIND:
            self._log.rewind(data["step"])
        self._log.take_changes()


class RunView(ABC):
    """One run; `overview` is up to those who know more of it.

    steps: of the job, or of this view, which then reads them from the events.
    """

    def __init__(self, run_dir: Path, steps: StepLog | None = None) -> None:
        self.run_dir = run_dir
        self.history = EventHistory()
        self._own_steps = steps is None
        self.steps = StepLog() if steps is None else steps
        self._offset = 0
        self._reading = asyncio.Lock()

    @abstractmethod
    async def overview(self) -> bytes:
        """The front page: `Overview` as JSON."""

    async def curves(self, metrics: Sequence[str], most: int) -> d.Curves:
        """Curves of these metrics as far as there are any, `most` points each."""
        return await self._read(lambda: self._curves(metrics, most))

    def _curves(self, metrics: Sequence[str], most: int) -> d.Curves:
        names = self.steps.names
        curves = {name: thin(self.steps.curve(name), most) for name in metrics if name in names}
        if VALIDATION in metrics and self.history.validations:
            curves[VALIDATION] = thin(sorted(self.history.validations.items()), most)
        for name, scores in self.history.sources.items() if SOURCES in metrics else ():
            curves[name] = thin(sorted(scores.items()), most)
        if VALIDATION_LOSS in metrics and self.history.losses:
            curves[VALIDATION_LOSS] = thin(sorted(self.history.losses.items()), most)
        return d.Curves(total=len(self.steps), names=sorted(names), curves=curves)

    async def timeline(self) -> d.Timeline:
        return await self._read(lambda: self.history.timeline(self.steps, self._now()))

    async def scaling(self) -> d.Scaling:
        """Rollout replicas over time; see `controller.dashboard.scaling`."""
        return await self._read(self._scaling)

    def _scaling(self) -> d.Scaling:
        settings, history = ScaleSettings.of(self._json("config.json"), self.run_dir), self.history
        return history.scaling.answer(settings, history.began, history.ended or None, self._now())

    def _now(self) -> float | None:
        """Return the present time of a job that is served, which goes on after its last event."""
        return None if self._own_steps else time.time()

    async def _read(self, work: Callable[[], R]) -> R:
        """`work` in a thread, after all events were read. Raises `ApiError` where a file cannot be read."""

        def both() -> R:
            self._catch_up()
            return work()

        async with self._reading:
            try:
                return await asyncio.to_thread(both)
            except OSError as error:
                detail = f"{error.filename} cannot be read: {error.strerror}"
                raise ApiError(ErrorCode.NOT_FOUND, detail) from None

    def _catch_up(self) -> None:
        """Read what was added to the file; half a line is left for the next time."""
        try:
            file = event_file.path_of(self.run_dir).open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                # Steps are the many: those that the job knows anyway are not even parsed.
                if self._own_steps or STEP_LINE not in line[:100]:
                    event = event_file.parse(line)
                    if event is not None and event.id > self.history.newest:
                        self._take(event)

    def _take(self, event: Event) -> None:
        event_file.fold([event], self.history, *([_Steps(self.steps)] if self._own_steps else []))

    # ---- files --------------------------------------------------------------------------------------------

    async def samples(
        self, kind: Any, step: int | None, order: sample_file.Order | None, limit: int
    ) -> list[SampleRecord]:
        """See `sample_file.find`."""
        folder = sample_file.folder_of(self.run_dir)
        return await self._read(lambda: sample_file.find(folder, kind=kind, step=step, order=order, limit=limit))

    async def kept(self) -> d.KeptSamples:
        """Which files of samples there are."""
        files = await asyncio.to_thread(sample_file.files, sample_file.folder_of(self.run_dir))
        train, validation = ([step for kind, step in files if kind == want] for want in ("train", VALIDATION))
        return d.KeptSamples(train=train[-MOST_KEPT:], validation=validation[-MOST_KEPT:])

    async def logs(self) -> list[d.LogFile]:
        return await self._read(self._logs)

    def _logs(self) -> list[d.LogFile]:
        try:
            with os.scandir(self.run_dir / "logs") as entries:
                files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        log_files = []
        for entry in islice(files, MOST_KEPT):
            stat = entry.stat()
            log_files.append(d.LogFile(name=entry.name, n_bytes=stat.st_size, at=stat.st_mtime))
        return sorted(log_files, key=lambda log: log.name)

    async def log(self, name: str, most: int) -> d.LogText:
        """The end of a log. Raises `ApiError`: a name that is not in the list."""
        return await self._read(lambda: self._log(name, most))

    def _log(self, name: str, most: int) -> d.LogText:
        if name not in {log.name for log in self._logs()}:
            detail = f"{name[:80]!r} is not a log of this run: GET /v1/logs lists them"
            raise ApiError(ErrorCode.NOT_FOUND, detail)
        with (self.run_dir / "logs" / name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            text = file.read(most).decode(errors="replace")
        text = text if size <= most else text.partition("\n")[2]
        return d.LogText(name=name, n_bytes=size, text=visible(text))

    async def config(self) -> dict[str, Any]:
        """config.json, secrets masked."""
        config: dict[str, Any] = cut(masked(await self._read(lambda: self._json("config.json"))))
        return config

    async def origins(self) -> dict[str, str]:
        """Where the keys that were written come from; those that are missing have their defaults."""
        origins = await self._read(lambda: self._json("origins.json"))
        return {key: str(where) for key, where in origins.items()}

    def _json(self, name: str) -> dict[str, Any]:
        """A JSON object of the run directory; empty where there is none, or it is damaged."""
        try:
            parsed = json.loads((self.run_dir / name).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return parsed if isinstance(parsed, dict) else {}
