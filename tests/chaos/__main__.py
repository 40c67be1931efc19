"""`python -m tests.chaos`: kill or stop everything, at random, and show that nothing is lost.

Starts the real program as a user does and sends SIGKILL or SIGSTOP to one of its processes after the other, at
moments drawn from a seed, in job after job, until enough have hit. After each job everything is counted: see
`tests.chaos.judge` for what must hold and `tests.chaos.traces` for what must not be left.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from examples.quickstart.make_model import make_model
from tests.chaos.job import Kill, StruckJob, Verdict
from tests.chaos.plan import ROLES, Role, plan
from tests.chaos.report import report, table
from tests.chaos.servers import NamedRedis, ObjectStore
from tests.chaos.setting import Setting

EPILOG = """\
what is killed
  controller, redis     the launcher starts them again, everybody waits for them
  rollout, policy       one of several processes of that role, picked at random
  reward                a process of a rollout replica's pool
  launcher              everything below it leaves; then `cosmos-launch --resume`
  store                 the S3 server that checkpoints are uploaded to; back after some seconds
  data                  the preparation of the data, at the start of a job
  trackers              the process that feeds trackers
sometimes it is the keeper above a process that is hit, sometimes two within a second. Three strikes in ten stop the
process (SIGSTOP) instead: it goes on after some seconds, by its keeper, or the launcher finds and restarts it. A
quarter of the others are SIGTERM, SIGINT or SIGHUP; `python -m tests.chaos.signals` tries all of these in order.

examples
  python -m tests.chaos --kills 10                     a quick look, a few minutes
  python -m tests.chaos --kills 100 --seed 7 --report chaos.md
  python -m tests.chaos --kills 25 --redis rediss      a separate server with password and TLS
  python -m tests.chaos --roles policy --kills 5       one role only
  python -m tests.chaos --seed 7 --skip 12 --kills 8   the thirteenth job of seed 7 again, and nothing before it

exit code 0: nothing was lost; 1: a violation (its job's folder is kept, the command to repeat it is printed);
130: Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    begun = time.monotonic()
    verdicts: list[Verdict] = []
    interrupted = False
    folder = _folder(options)
    try:
        with ExitStack() as servers:
            _run(options, folder, servers, verdicts, begun)
    except KeyboardInterrupt:
        interrupted = True
        _say("interrupted; everything was ended")
    failed = [verdict for verdict in verdicts if verdict.violations]
    _say("", table(verdicts), sep="\n")
    if options.report:
        text = report(verdicts, _command(options), time.monotonic() - begun, complete=not interrupted)
        options.report.write_text(text)
        _say(f"report: {options.report}")
    if failed:
        _say(f"kept: {folder}")  # its logs are needed
    elif not options.folder:
        shutil.rmtree(folder)
    return 130 if interrupted else 1 if failed else 0


def _run(
    options: argparse.Namespace, folder: Path, servers: ExitStack, verdicts: list[Verdict], begun: float
) -> None:
    model = folder / "model"
    make_model(model, seed=1)
    redis = servers.enter_context(NamedRedis()) if options.redis == "rediss" else None
    store = servers.enter_context(ObjectStore()) if "store" in options.roles else None
    setting = Setting(engine=options.engine)
    done = 0

    def tell(kill: Kill) -> None:
        nonlocal done
        done += 1
        _say(
            f"{time.monotonic() - begun:6.0f} s  kill {done:3d}/{options.kills}  {kill.target:<26} "
            f"{kill.since_start:5.1f} s into its job, step {kill.step} ({kill.phase}, {kill.moment})"
        )

    for number, job_plan in enumerate(plan(options.seed, options.kills, options.roles, options.per_job)):
        if number < options.skip:
            continue
        if done >= options.kills or time.monotonic() - begun > options.minutes * 60:
            return
        where = folder / f"job-{number}"
        job = StruckJob(job_plan, setting, where, model, tell, options.kills - done, redis, store)
        verdict = job.run()
        verdicts.append(verdict)
        _tell_verdict(number, verdict, begun)
        if verdict.violations:
            _say(
                f"again: python -m tests.chaos --seed {options.seed} --skip {number} --kills {options.per_job}"
                f"{_how(options)}"
            )
            if not options.keep_going or not verdict.kills:
                return
        elif not options.folder:
            shutil.rmtree(where)


def _tell_verdict(number: int, verdict: Verdict, begun: float) -> None:
    _say(
        f"{time.monotonic() - begun:6.0f} s  job {number} {'FAILED' if verdict.violations else 'is whole'}: "
        f"{len(verdict.kills)} kills, {verdict.rewinds} rewinds, {verdict.dropped} dropped, "
        f"{verdict.seconds:.0f} s"
    )
    for violation in verdict.violations:
        _say(f"          VIOLATION {violation}")


def _folder(options: argparse.Namespace) -> Path:
    if options.folder:
        path: Path = options.folder.absolute()
        path.mkdir(parents=True)
        return path
    return Path(tempfile.mkdtemp(prefix="chaos-"))


def _how(options: argparse.Namespace) -> str:
    parts = []
    if tuple(options.roles) != ROLES:
        parts.append(f"--roles {','.join(options.roles)}")
    if options.per_job != PER_JOB:
        parts.append(f"--per-job {options.per_job}")
    if options.engine != "transformers":
        parts.append(f"--engine {options.engine}")
    if options.redis != "embedded":
        parts.append(f"--redis {options.redis}")
    return "".join(f" {part}" for part in parts)


def _command(options: argparse.Namespace) -> str:
    return f"python -m tests.chaos --kills {options.kills} --seed {options.seed}{_how(options)}"


PER_JOB = 8


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description="Kill the processes of real jobs at random and check that nothing is lost, trained twice, "
        "too old, or left behind.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=_positive, default=10, help="how many must hit (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="what all moments and victims are drawn from")
    parser.add_argument("--roles", type=_roles, default=ROLES, metavar="A,B", help="default: " + ",".join(ROLES))
    parser.add_argument("--per-job", type=_positive, default=PER_JOB, help=f"kills of a job (default: {PER_JOB})")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N jobs of the seed")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--redis", choices=("embedded", "rediss"), default="embedded")
    parser.add_argument("--minutes", type=float, default=90.0, help="start no further job after that (default: 90)")
    parser.add_argument("--keep-going", action="store_true", help="go on after a violation")
    parser.add_argument("--report", type=Path, help="write a Markdown report to this file")
    parser.add_argument("--folder", type=Path, help="keep the jobs in this new directory (default: a temporary one)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _roles(text: str) -> tuple[Role, ...]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ROLES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is unknown; there are {', '.join(ROLES)}")
    return tuple(role for role in ROLES if role in names)


def _interrupt(*_: int | FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _say(*lines: str, sep: str = "\n") -> None:
    sys.stdout.write(sep.join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
