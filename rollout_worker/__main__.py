"""`python -m rollout_worker`: one rollout replica.

Environment: COSMOS_CONTROLLER_URL and COSMOS_TOKEN (the rollout role's); optional COSMOS_REPLICA_NAME,
COSMOS_REPLICA_SECRET (who starts it again with the same one has its name at once), COSMOS_CPU_THREADS,
COSMOS_PARENT_PID; COSMOS_ENGINE_* of an engine over several machines (see `engines.vllm.nodes`). Everything
else comes with the registration.

SIGTERM drains: no more leases, what can be is finished and pushed, the rest given back, all of it within
launcher.shutdown_timeout; a second SIGTERM gives everything back at once.

Exit codes: 0 the job is over, or this replica was asked to leave; 2 the settings cannot work; 5 another replica lives
under its name; 1 anything else, to be restarted.
"""

from __future__ import annotations

import logging
import os
import socket
import sys

import uvloop

from controller.client import ControllerError, Unauthorized, UnknownToken, Unusable
from rollout_worker.engines.base import EngineConfigError, EngineError
from rollout_worker.errors import StoreSettingsError, WeightsUnreadableError
from rollout_worker.rewards.pool import RewardPoolError
from rollout_worker.rewards.registry import RewardConfigError
from rollout_worker.session import JobOverError, NameTakenError, SupersededError
from rollout_worker.shutdown import ExitWatchdog
from schema.util.imports import wait_asleep, without_collections
from schema.util.text import configure_logging
from schema.wire.secret import fault

OK, FAILED, CONFIG, NAME_TAKEN = 0, 1, 2, 5
log = logging.getLogger("rollout_worker")


class EnvironmentMissingError(Exception):
    """A variable that this process needs is not set, or not usable."""


def main() -> int:
    _set_up_logging()
    try:
        url, token = _required("COSMOS_CONTROLLER_URL"), _required("COSMOS_TOKEN")
        parent, threads = _number("COSMOS_PARENT_PID"), _number("COSMOS_CPU_THREADS")
        secret = _secret("COSMOS_REPLICA_SECRET")
    except EnvironmentMissingError as error:
        log.error("%s", error)
        return CONFIG
    name = os.environ.get("COSMOS_REPLICA_NAME") or f"{socket.gethostname()}-{os.getpid()}"
    return _run(url, token, name, secret, parent, threads)


def _run(url: str, token: str, name: str, secret: str, parent: int | None, threads: int | None) -> int:
    with without_collections():
        _set_up_libraries(threads)
        from rollout_worker.worker import Worker  # after the environment is known to be right: it takes seconds

    watchdog = ExitWatchdog(OK)

    async def work() -> None:
        worker = Worker(url, token, name, parent, secret)
        worker.shutdown.install_signals()
        worker.shutdown.on_asked = watchdog.start
        worker.on_config = watchdog.configure
        await worker.run()

    try:
        uvloop.run(work())
    except (EngineConfigError, RewardConfigError, StoreSettingsError) as error:
        log.error("%s", error)
        return CONFIG
    except UnknownToken as error:
        log.error("COSMOS_TOKEN, COSMOS_CONTROLLER_URL: %s", error)
        return CONFIG
    except Unauthorized as error:
        log.error(
            "%s refuses COSMOS_TOKEN: %s; it must be the rollout token of this job, which is in "
            "RUN_DIR/.tokens/rollout where the job was started",
            url,
            error,
        )
        return CONFIG
    except Unusable as error:
        log.error("COSMOS_CONTROLLER_URL, COSMOS_TOKEN: %s", error)
        return CONFIG
    except JobOverError as error:
        log.info("%s", error)
        return OK
    except NameTakenError as error:
        log.error("%s", error)
        return NAME_TAKEN
    except (ControllerError, EngineError, RewardPoolError, SupersededError, WeightsUnreadableError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return FAILED
    except Exception:
        log.exception("the rollout worker failed")
        return FAILED
    return OK


def _required(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise EnvironmentMissingError(
            f"{name} is not set: a rollout replica needs the controller's URL and the rollout token"
        )
    return value


def _secret(name: str) -> str:
    """Taken out of the environment: what this process starts has no business with it."""
    value = os.environ.pop(name, "")
    if value and (why := fault(value)):
        raise EnvironmentMissingError(f"{name} {why}")
    return value


def _number(name: str) -> int | None:
    value = os.environ.get(name, "")
    if not value:
        return None
    if not value.isdigit() or int(value) < 1:
        raise EnvironmentMissingError(f"{name} = {value!r} is not a positive number")
    return int(value)


def _set_up_logging() -> None:
    configure_logging(force=True)
    for noisy in ("httpx", "httpx2", "httpcore", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _set_up_libraries(threads: int | None) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    wait_asleep()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        torch.set_num_threads(threads)


if __name__ == "__main__":
    sys.exit(main())
