"""`python -m policy_worker.replay RUN_DIR`: one rank that trains recorded batches again, without a controller.

Environment: optional COSMOS_CPU_THREADS, COSMOS_PARENT_PID; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT as
torchrun sets them. Started by `cosmos-launch replay`. What each step gave goes as a line of JSON to standard output,
or to --output, from rank 0.

Exit codes: 0 done or asked to leave; 2 the run has no such batches, or the settings cannot work; 1 anything else.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import ValidationError

from policy_worker.errors import PolicyError, SettingsError
from policy_worker.process import (
    RankEnvironment,
    ShutdownRequest,
    enforce,
    install_signals,
    number_of,
    set_up_logging,
    set_up_torch,
    watch_parent,
)
from schema.config import Config
from schema.util.imports import without_collections
from schema.wire.batch_file import folder_of

log = logging.getLogger("replay")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, replay, say what went wrong."""
    parser = argparse.ArgumentParser(prog="python -m policy_worker.replay")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--config", type=Path, default=None, help="default: the run's own")
    parser.add_argument("--first-step", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--output", type=Path, default=None, help="default: standard output")
    options = parser.parse_args(arguments)
    ranks = RankEnvironment()
    try:
        ranks = RankEnvironment.of_environ()
        set_up_logging(ranks.rank)
        shutdown = ShutdownRequest()
        install_signals(shutdown)
        enforce(shutdown)
        watch_parent(number_of("COSMOS_PARENT_PID"), shutdown)
        set_up_torch(ranks.local_world)
        _run(options, ranks, shutdown)
    except PolicyError as error:
        log.error("%s: %s", type(error).__name__, error)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace, ranks: RankEnvironment, shutdown: ShutdownRequest) -> None:
    config = _config_of(options.config or options.run_dir / "config.json")
    shutdown.grace = config.launcher.shutdown_timeout
    with without_collections():
        import torch  # after everything that can be found without it: it takes seconds
        from transformers.utils import logging as transformers_logging

        from policy_worker.checkpoints.load import load
        from policy_worker.parallel.rank_group import RankGroup
        from policy_worker.training.batches.recording import RecordedBatches
        from policy_worker.training.grpo import Grpo
        from policy_worker.training.profiles import Profiles
        from policy_worker.training.replay import Replay, Report, begin
        from policy_worker.training.teachers import tokenizer_of
        from policy_worker.worker import make_trainer
    transformers_logging.disable_progress_bar()
    if (threads := number_of("COSMOS_CPU_THREADS")) is not None:
        torch.set_num_threads(threads)
    with ExitStack() as stack:
        group = RankGroup(ranks)
        stack.callback(group.close)
        stream = sys.stdout if options.output is None else stack.enter_context(options.output.open("a"))
        report = Report(stream if group.leads else None)
        logging.getLogger().addHandler(report)
        stack.callback(logging.getLogger().removeHandler, report)
        beginning = begin(group, config, options.run_dir, options.first_step, options.steps)
        trainer = make_trainer(config, group, beginning.facts.total_steps, beginning.resumption)
        if beginning.resumption is not None:
            load(beginning.resumption, trainer, config, None)
        report.line(
            "begin",
            steps=beginning.steps,
            ranks=group.world,
            recorded_ranks=beginning.facts.ranks,
            weights=beginning.weights,
            weights_step=beginning.weights_step,
            exact=beginning.exact,
        )
        batches = RecordedBatches(folder_of(options.run_dir), config.staleness_bound)
        folder = options.run_dir / "profiles"
        profiles = Profiles(config.profiler, trainer, folder, None, shutdown, prefix="replay-")
        algorithm = Grpo(config, trainer, batches)
        algorithm.teachers.shutdown = shutdown
        if any(teacher.url for teacher in config.teacher):
            algorithm.teachers.meet(tokenizer_of(config))
        replay = Replay(algorithm, group, shutdown, report, profiles)
        replay.run(beginning.steps, options.repeat)


def _config_of(path: Path) -> Config:
    """Raises `SettingsError`: there is none, it is damaged, or it is of another kind of job."""
    try:
        config = Config.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    if not config.is_grpo:
        raise SettingsError(f"{path}: supervised training records no batches, so there are none to train again")
    return config


if __name__ == "__main__":
    sys.exit(main())
