"""`python -m rollout_worker.engines.vllm.follower`: vLLM's ranks on a further machine of an engine.

Environment: COSMOS_ENGINE_NODES, COSMOS_ENGINE_NODE, COSMOS_ENGINE_LEADER, COSMOS_ENGINE_FOLDER, COSMOS_ENGINE_CONFIG
and COSMOS_TOKEN (the rollout role's). It runs what its own configuration says, the file COSMOS_ENGINE_CONFIG, if the
engine's first machine (see `nodes`), which alone talks to the controller, runs the same.

It ends with the engine: nothing follows from SIGTERM, since the first machine still drains; a second one ends it at
once.

Exit codes: 0 the engine is over; 2 the settings cannot work; 1 anything else, to be restarted.
"""

from __future__ import annotations

import logging
import os
import signal
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from rollout_worker.engines.base import EngineConfigError, EngineFailed
from rollout_worker.engines.vllm import processes
from rollout_worker.engines.vllm.adapter import engine_config
from rollout_worker.engines.vllm.nodes import LeadingNode, NodeError, differences, join, nodes_of
from rollout_worker.engines.vllm.processes import boot_environment, environment
from rollout_worker.engines.vllm.scratch import Scratch
from schema.config import Config
from schema.util.text import configure_logging
from schema.util.threads import in_daemon

log = logging.getLogger("rollout_worker.follower")
OK, FAILED, CONFIG = 0, 1, 2


def main() -> int:
    """Run the ranks of this machine until the engine is over; the exit code."""
    configure_logging(force=True)
    try:
        nodes = nodes_of(os.environ)
        if nodes is None or nodes.config is None:
            raise EngineConfigError("COSMOS_ENGINE_NODES and COSMOS_ENGINE_NODE do not name a further machine")
        config = _own_config(nodes.config)
    except EngineConfigError as error:
        log.error("%s", error)
        return CONFIG
    try:
        leader = join(nodes)
    except NodeError as error:
        log.error("%s", error)
        return FAILED
    signal.signal(signal.SIGTERM, _heard)
    if unlike := differences(config, leader.config):
        reason = f"node 0 runs another configuration than {nodes.config} of node {nodes.index}: {', '.join(unlike)}"
        leader.tell_failure(reason)
        log.error("%s; give all machines of the engine the same file", reason)
        return CONFIG
    return _follow(leader, config)


def _own_config(path: Path) -> Config:
    """Raises `EngineConfigError`: it cannot be read, or is not a configuration."""
    try:
        return Config.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise EngineConfigError(f"COSMOS_ENGINE_CONFIG: {path}: {error}") from None


def _heard(*_: Any) -> None:
    log.info("the first machine of the engine ends this one; another SIGTERM does so at once")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _follow(leader: LeadingNode, config: Config) -> int:
    before = processes.children()
    try:
        scratch = Scratch()
    except OSError as error:
        log.error("no directory for vLLM's temporary files: %s", error)
        leader.tell_failure(f"no directory for vLLM's temporary files: {error}")
        return FAILED
    over = in_daemon(leader.wait, "leader")
    ranks: Future[None] = in_daemon(lambda: _run(leader, config, scratch), "ranks")
    wait([over, ranks], return_when=FIRST_COMPLETED)
    code = OK
    if ranks.done():
        failure = ranks.exception()
        code = CONFIG if isinstance(failure, EngineConfigError) else FAILED
        reason = str(failure) or type(failure).__name__
        log.error("%s", reason)
        leader.tell_failure(reason)
    elif (gone := over.exception()) is not None:
        log.error("%s", gone)
        code = FAILED
    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it would report the end of its ranks as a failure
    started = processes.started_by_vllm(before)
    segments = processes.shared_segments(started)
    processes.end(started)
    for segment in segments:
        segment.unlink(missing_ok=True)
    scratch.remove()
    return code


def _run(leader: LeadingNode, config: Config, scratch: Scratch) -> NoReturn:
    """Start the ranks and wait for their end. Raises `EngineConfigError`, `EngineFailed`."""
    modules, sampling = config.policy.external_modules, config.rollout.sampling_config
    values = boot_environment(os.getpid(), modules, flashinfer=sampling.use_flashinfer)
    with environment(values | scratch.environment()):
        vllm_config = engine_config(config, leader.nodes)
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        try:
            executor = MultiprocExecutor(vllm_config, monitor_workers=False)
        except Exception as error:
            raise EngineFailed(f"vLLM's ranks did not start: {error}") from error
    log.info("the ranks of this machine run")
    executor.start_worker_monitor(inline=True)
    raise EngineFailed("vLLM's ranks have died (their last messages are in the log above)")


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)  # vLLM's own cleanup would wait for processes that are gone
