"""`python -m policy_worker`: one rank of a policy replica.

Environment: COSMOS_CONTROLLER_URL, COSMOS_TOKEN (the policy role's); optional COSMOS_REPLICA_NAME,
COSMOS_CPU_THREADS, COSMOS_PARENT_PID; RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE as torchrun sets them, and where
several ranks meet: COSMOS_RENDEZVOUS (an id, new at each start of the replica) with COSMOS_NODE_ADDRESS (of this
machine for the others, 127.0.0.1), or MASTER_ADDR and MASTER_PORT.

Exit codes: 0 finished or asked to leave; 2 the settings cannot work; 4 there is nothing to resume from; 1 anything
else, to be restarted.
"""

from __future__ import annotations

import logging
import sys

from controller.client import ControllerError, Unauthorized, UnknownToken
from policy_worker.errors import PolicyError, SettingsError
from policy_worker.process import (
    Environment,
    RankEnvironment,
    ShutdownRequest,
    enforce,
    install_signals,
    set_up_logging,
    set_up_torch,
    watch_parent,
)
from schema.util.imports import without_collections

log = logging.getLogger("policy_worker")


def main() -> int:
    ranks = RankEnvironment()
    try:
        ranks = RankEnvironment.of_environ()
        set_up_logging(ranks.rank)
        environment = Environment.of_environ()
    except SettingsError as error:
        set_up_logging(ranks.rank)
        log.error("%s", error)
        return error.exit_code
    shutdown = ShutdownRequest()
    install_signals(shutdown)
    enforce(shutdown)
    watch_parent(environment.parent, shutdown)
    set_up_torch(ranks.local_world)
    return _run(environment, ranks, shutdown)


def _run(environment: Environment, ranks: RankEnvironment, shutdown: ShutdownRequest) -> int:
    with without_collections():
        import torch  # after the environment is known to be right: it takes seconds
        from transformers.utils import logging as transformers_logging

        from policy_worker.worker import run_rank
        from weight_sync import WeightError

    transformers_logging.disable_progress_bar()
    if environment.threads is not None:
        torch.set_num_threads(environment.threads)
    try:
        run_rank(environment, ranks, shutdown)
    except PolicyError as error:
        log.log(logging.ERROR if error.exit_code else logging.INFO, "%s: %s", type(error).__name__, error)
        return error.exit_code
    except UnknownToken as error:
        log.error("COSMOS_TOKEN, COSMOS_CONTROLLER_URL: %s", error)
        return SettingsError.exit_code
    except Unauthorized as error:
        log.error("%s: COSMOS_TOKEN is not the policy token of this job", error)
        return SettingsError.exit_code
    except (ControllerError, WeightError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return PolicyError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
