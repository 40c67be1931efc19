"""The directory of one run: made, found again, locked, and given its secrets.

    <output_dir>/<timestamp>/
        config.json, config.toml   what the run does (no secrets)
        logs/<process>.log         one per process, appended to
        .tokens/user, rollout      0600, in a directory of 0700
        .locks/<role>.lock         held by the living processes of a role (see launcher.processes.keeper)
        .locks/launcher.lock       held by the launcher, and names that process: the run is alive
        launcher.json              the launcher's record: processes, restarts, what died (launcher.job.launcher_log)
        starts.json                time and restarts of the starts before this one
        events.jsonl, samples/     what happened, and what the model wrote (schema.wire.event_file, .sample_file)
        redis/, data/, weights/, checkpoints/, profiles/, final/, final_ema/, controller.json, summary.json
        batches/                   those of the newest steps (schema.wire.batch_file), where they are recorded

Private to their owner are .tokens/, .locks/, redis/, profiles/ with reports of Nsight Systems, and config.json
and config.toml, into which people may have written what they should not; all else has the mode that the umask gives
(`schema.util.files` corrects libraries that make files 0600 on their own).

A run is alive iff its launcher's lock is held: the kernel lets go of it with the process, however that ends, so no
reused process id can be mistaken for a launcher. What outlives a killed launcher for
some seconds holds the lock of its role: whoever resumes the run waits for it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from launcher.errors import LaunchError
from launcher.locks import held_alone, held_by_any
from launcher.paths import absolute, resolved
from schema.config import Config
from schema.config.loading.tomlwrite import dumps
from schema.util.atomic_file import write_text
from schema.util.file_lock import try_lock
from schema.wire.data_report import has_all_rows, set_aside

LEAVING_POLL = 0.1
LOCK_PATIENCE = 0.5
"""Seconds: a look at whether the run is alive holds the lock for a moment."""
TEMPORARY = re.compile(r"\..+\.[0-9a-f]+")
"""Names under which files are written before they are renamed: `.<name>.<pid or chance>`."""
SWEPT = (".tokens", "batches", "checkpoints", "data", "profiles", "uploads")
LOCKED_ROLES = ("workers", "controller", "redis", "trackers")
OUTCOMES = ("finished", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class RunTokens:
    """One bearer token per role of the API."""

    user: str
    rollout: str
    policy: str

    @classmethod
    def fresh(cls) -> Self:
        return cls(*(secrets.token_urlsafe(32) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class RunHolder:
    """The launcher of a living run."""

    pid: int
    host: str
    since: float
    """Unix time."""

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"pid {self.pid}" + ("" if self.is_here else f" on {self.host}")


class RunDir:
    """Paths and secrets of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs, self.locks, self.redis = path / "logs", path / ".locks", path / "redis"
        self.config_json, self.summary_json = path / "config.json", path / "summary.json"
        self.controller_json, self.launcher_json = path / "controller.json", path / "launcher.json"
        self.origins_json = path / "origins.json"
        self.config_toml, self.checkpoints = path / "config.toml", path / "checkpoints"
        self.profiles, self.starts_json = path / "profiles", path / "starts.json"
        self.prompts = path / "data" / "train.safetensors"
        self._lock: int | None = None

    def take(self) -> bool:
        """Make the directory itself; False if another launcher was faster. Raises LaunchError if that fails."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            return False
        except OSError as error:
            raise self._not_made(error) from None
        return True

    def make(self) -> None:
        """Make the folders. Raises LaunchError where that is not possible."""
        try:
            for folder in (self.logs, self.path / "data", self.path / "weights", self.path / "checkpoints"):
                folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.locks, self.redis, self.path / ".tokens"):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._not_made(error) from None

    def _not_made(self, error: OSError) -> LaunchError:
        return LaunchError(
            f"train.output_dir: {self.path} cannot be created: {error.strerror}",
            "choose a directory that you may write to",
        )

    def write_config(self, config: Config) -> dict[str, Any]:
        """Write config.json and config.toml, and return what they hold."""
        data = self._config_data(config)
        write_text(self.config_json, json.dumps(data, indent=2, ensure_ascii=False) + "\n", mode=0o600)
        # As a starting point for another run: under a name of its own, and not as a resumed one.
        again = {**data, "train": {**data["train"], "timestamp": "", "resume": False}}
        write_text(self.config_toml, dumps(again), mode=0o600)
        return data

    def _config_data(self, config: Config) -> dict[str, Any]:
        """The configuration as config.json has it."""
        data = resolved(config)
        data["train"]["output_dir"], data["train"]["timestamp"] = str(self.path.parent), self.path.name
        return data

    def write_origins(self, origins: Mapping[str, str]) -> None:
        """Write origins.json, by key; a start that goes on with config.toml leaves those of its keys as they were."""
        earlier, written = read_json(self.origins_json) or {}, str(self.config_toml)
        kept = {key: earlier.get(key, "") if where.startswith(written) else where for key, where in origins.items()}
        text = json.dumps({key: where for key, where in kept.items() if where}, indent=2)
        write_text(self.origins_json, text + "\n", mode=0o600)

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is, or may be, a checkpoint of its own."""
        return any((self.path / "checkpoints").glob("step-*"))

    @property
    def began_from(self) -> str | bool:
        """`train.resume` of the start that began the run, as config.json has it."""
        resume = ((self.written_config() or {}).get("train") or {}).get("resume", False)
        return resume if isinstance(resume, str | bool) else False

    def written_config(self) -> dict[str, Any] | None:
        """config.json of an earlier start, or None."""
        return read_json(self.config_json)

    def write_start(self, config: Config, origins: Mapping[str, str]) -> tuple[RunTokens, bool]:
        """Write the configuration, where its keys come from, and fresh tokens.

        Returns the tokens, and whether the data that an earlier start prepared can be used again.
        """
        before, now = self.written_config(), self._config_data(config)
        reusable = before is not None and _same_data(before, now) and has_all_rows(self.prompts)
        if not reusable:
            set_aside(self.prompts)  # before the configuration is there: however this start ends, they are not of it
        self.write_config(config)
        self.write_origins(origins)
        tokens = RunTokens.fresh()
        self.write_tokens(tokens, trainers=config.policy.parallelism.n_init_replicas > 1)
        return tokens, reusable

    def write_tokens(self, tokens: RunTokens, *, trainers: bool = False) -> None:
        """Leave the tokens that people need: `user` to look and operate, the others to join a replica by hand.

        trainers: whether policy replicas may join.
        """
        for name in ("user", "rollout", *(["policy"] if trainers else [])):
            write_text(self.path / ".tokens" / name, getattr(tokens, name), mode=0o600)

    def read_token(self, name: str = "user") -> str | None:
        """None: there is none that this user may read."""
        return (self._of_owner(self.path / ".tokens" / name) or "").strip() or None

    @property
    def is_own(self) -> bool:
        """Whether this user, or root, has started the run: its files can be believed."""
        try:
            return self._owner() in (os.geteuid(), 0)
        except OSError:
            return False

    def read_of_owner(self, path: Path) -> dict[str, Any] | None:
        """A JSON object that decides where a token is sent; None if there is none, or it is damaged.

        It is read only if it has the same owner as config.json, as the tokens must, so that no other user can
        redirect a token.
        """
        return _object(self._of_owner(path))

    def _owner(self) -> int:
        """The user who started the run, who may not own its directory. Raises OSError."""
        return (self.config_json if self.config_json.exists() else self.path).stat().st_uid

    def _of_owner(self, path: Path) -> str | None:
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO is not waited for
            with os.fdopen(handle, encoding="utf-8") as file:
                facts = os.fstat(handle)
                same = stat.S_ISREG(facts.st_mode) and facts.st_uid == self._owner()
                return file.read() if same else None
        except (OSError, UnicodeDecodeError):
            return None

    # ---- alive or not -------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        """Whether a launcher runs in this directory."""
        return held_alone(self.locks / "launcher.lock")

    def holder(self) -> RunHolder | None:
        """The launcher that holds the lock; None if none does, or it has not written its id yet."""
        holder = read_json(self.locks / "launcher.lock")
        if holder is None or not self.is_alive():
            return None
        try:
            return RunHolder(int(holder["pid"]), str(holder["host"]), float(holder["since"]))
        except (KeyError, TypeError, ValueError):
            return None

    def launcher(self) -> dict[str, Any]:
        """Read the record of the launcher (`launcher.job.launcher_log`): of the one that lives, else of the last."""
        record, holder = read_json(self.launcher_json) or {}, self.holder()
        earlier = self.is_alive() if holder is None else record.get("pid") != holder.pid
        return {} if earlier else record

    def summary(self) -> dict[str, Any] | None:
        """How the run ended, with paths as they are now; None if it has not, or it could not be written."""
        summary = read_json(self.summary_json)
        if summary is None or summary.get("outcome") not in OUTCOMES:
            return None
        model = str(self.path / "final") if summary.get("final_model") else None
        return {**summary, "run_dir": str(self.path), "final_model": model}

    def leaving(self) -> list[str]:
        """Roles whose processes still run: the job's, or what outlives a killed launcher."""
        return [role for role in LOCKED_ROLES if held_by_any(self.locks / f"{role}.lock")]

    def lock(self) -> None:
        """Take the launcher's lock for the life of this process. Raises LaunchError if that is not possible."""
        try:
            handle = os.open(self.locks / "launcher.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(
                f"{self.path} cannot be written to: {error.strerror}",
                "go on with it as the user who started it, where it can be written, or copy it and resume the copy",
            ) from None
        give_up = time.monotonic() + LOCK_PATIENCE
        try:
            while not (free := try_lock(handle, exclusive=True)) and time.monotonic() < give_up:
                time.sleep(LEAVING_POLL)
        except OSError as error:
            os.close(handle)
            raise LaunchError(
                f"train.output_dir: files in {self.path} cannot be locked: {error.strerror}",
                "choose a directory on a file system that has locks",
            ) from None
        if not free:
            os.close(handle)
            raise already_running(self)
        self._lock = handle
        os.ftruncate(handle, 0)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.pwrite(handle, json.dumps(holder).encode(), 0)

    def unlock(self) -> None:
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, the directory is this process's alone. Raises LaunchError: it cannot be made, or another has it."""
        self.make()
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    def take_over(self, patience: float, event: Callable[[str], None]) -> None:
        """Go on with a run once the processes of an earlier start have left; they get `patience` seconds.

        Raises LaunchError: some do not leave.
        """
        if leaving := self.leaving():
            event(f"waiting for processes of an earlier start to leave ({', '.join(leaving)})")
        self.wait_until_left(patience)
        self.forget_earlier_end()
        self.sweep()

    def wait_until_left(self, timeout: float) -> None:
        """Wait for processes of an earlier, killed launcher. Raises LaunchError if they do not leave."""
        give_up = time.monotonic() + timeout
        while held := self.leaving():
            if time.monotonic() >= give_up:
                raise LaunchError(
                    f"processes of an earlier start of {self.path} still run ({', '.join(held)})",
                    f"wait for them, or end them with `cosmos-launch stop {self.path} --now`",
                )
            time.sleep(LEAVING_POLL)

    def forget_earlier_end(self) -> None:
        """A run that goes on has not ended: what an earlier start wrote of its end would be read as this one's."""
        self._add_to_earlier(read_json(self.launcher_json) or {})
        for path in (self.summary_json, self.launcher_json):
            path.unlink(missing_ok=True)

    def earlier(self) -> dict[str, Any]:
        """Read the totals of all starts before this one: `starts`, `elapsed_s`, and `restarts` by name."""
        return {"starts": 0, "elapsed_s": 0.0, "restarts": {}} | (read_json(self.starts_json) or {})

    def _add_to_earlier(self, launcher: Mapping[str, Any]) -> None:
        """Add a start, by what its launcher wrote last: it may have been killed."""
        try:
            seconds = max(0.0, float(launcher["seen_at"]) - float(launcher["started_at"]))
            restarts = {name: int(process["restarts"]) for name, process in launcher["processes"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        earlier = self.earlier()
        written = {"starts": earlier["starts"] + 1, "elapsed_s": earlier["elapsed_s"] + seconds}
        written["restarts"] = Counter(earlier["restarts"]) + Counter(restarts)
        write_text(self.starts_json, json.dumps(written) + "\n")

    def sweep(self) -> None:
        """Remove temporary files that killed processes have left next to others. Only while none of the run lives."""
        for folder in (self.path, *(self.path / name for name in SWEPT)):
            for path in folder.glob(".*"):
                if TEMPORARY.fullmatch(path.name) and path.is_file():
                    path.unlink(missing_ok=True)


def already_running(run: RunDir) -> LaunchError:
    holder = run.holder()
    return LaunchError(
        f"a job runs in {run.path} already" + (f" (its launcher is {holder})" if holder else ""),
        f"`cosmos-launch status {run.path}` shows it, `cosmos-launch stop {run.path}` ends it",
    )


def _same_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two configurations prepare the same data: nothing but the resumption and the services differs."""

    def relevant(data: Mapping[str, Any]) -> dict[str, Any]:
        return {**data, "train": {**data["train"], "resume": None}, "controller": None, "launcher": None}

    return relevant(before) == relevant(now)


def choose(config: Config, resume: bool, now: float) -> tuple[RunDir, bool]:
    """The directory for this start, and whether it continues an earlier run.

    Resuming takes the directory of `train.timestamp`, else the newest run of `train.output_dir`; where there is
    none the run starts afresh. Raises LaunchError if a new run would mix with an old one.
    """
    root, name = Path(absolute(config.train.output_dir)), config.train.timestamp
    if resume:
        earlier = named_or_newest(config)
        if earlier is not None and earlier.config_json.is_file():
            return earlier, True
    if name:
        run = RunDir(root / name)
        if run.is_alive():
            raise already_running(run)
        if run.config_json.exists():
            raise LaunchError(
                f"train.timestamp: {run.path} holds a run already",
                "continue it with --resume, or leave train.timestamp out to start another one",
            )
        return run, False
    stamp = time.strftime("%Y%m%d%H%M%S", time.localtime(now))
    path, count = root / stamp, 1
    while path.exists():
        path, count = root / f"{stamp}-{count}", count + 1
    return RunDir(path), False


def named_or_newest(config: Config) -> RunDir | None:
    """The run of `train.timestamp`, whether it is there or not; else the newest one of `train.output_dir`."""
    root, name = Path(absolute(config.train.output_dir)), config.train.timestamp
    return RunDir(root / name) if name else newest(root)


def claim(config: Config, resume: bool) -> tuple[RunDir, bool]:
    """Choose the directory, and make one without a name at once: another launcher may begin in the same second."""
    while True:
        run, continues = choose(config, resume, time.time())
        if continues or config.train.timestamp or run.take():
            return run, continues


def is_run(path: Path) -> bool:
    """Whether a directory is that of a run."""
    return os.path.isfile(path / "config.json") and os.path.isdir(path / "logs")


def newest(root: Path, *, nested: bool = False) -> RunDir | None:
    """The run below `root` that was started last. nested: `root` may hold directories of runs, too.

    What cannot be read is passed over.
    """
    runs = {}
    for path in itertools.chain(root.glob("*"), root.glob("*/*") if nested else ()):
        if is_run(path):
            try:
                runs[path] = (path / "config.json").stat().st_mtime
            except OSError:  # removed just now
                continue
    return RunDir(max(runs, key=lambda path: runs[path])) if runs else None


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is none or it is damaged."""
    try:
        return _object(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def _object(text: str | None) -> dict[str, Any] | None:
    try:
        data = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
