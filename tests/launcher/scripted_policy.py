"""A policy replica that does not train: it registers with the real controller and commits steps on a schedule.

    python -m tests.launcher.scripted_policy '{"pause": 0.05, "die_at": 3, "code": 1}'

die_at: committed steps at which its first life ends with `code` (a negative one: that signal); a second life,
recognised by a file in the run directory, goes on. stubborn: SIGTERM is ignored. hold_at: committed steps at which it
waits for the file `go` in the run directory, in every life: so a test finds the job there, however late it looks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from controller.client import Client
from controller.client import calls as api
from schema.wire import messages as m
from tests.support.waiting import PATIENCE, until


def main() -> int:
    script: dict[str, Any] = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, signal.SIG_IGN if script.get("stubborn") else lambda *_: sys.exit(0))
    with Client(os.environ["COSMOS_CONTROLLER_URL"], os.environ["COSMOS_TOKEN"], patience=PATIENCE) as client:
        return train(client, script)


def train(client: Client, script: dict[str, Any]) -> int:
    reply = client.send(
        api.register(
            m.RegisterRequest(
                request_id=uuid.uuid4().hex,
                role="policy",
                name=os.environ["COSMOS_REPLICA_NAME"],
                pid=os.getpid(),
                resume_step=script.get("resume_step"),
            )
        )
    )
    first_life = Path(reply.run_dir) / "first_life"
    is_first = not first_life.exists()
    first_life.touch()
    step, finished = reply.committed_steps, False
    while not finished:
        if (is_first or script.get("every_life")) and step == script.get("die_at"):
            print(f"dying at step {step}", flush=True)
            if script["code"] < 0:
                os.kill(os.getpid(), -script["code"])
            return int(script["code"])
        if step == script.get("hold_at"):
            go = Path(reply.run_dir) / "go"
            until(go.exists, "the word to go on", 3 * PATIENCE)
        time.sleep(script.get("pause", 0.02))
        answer = client.send(
            api.commit(
                step,
                m.CommitRequest(
                    request_id=uuid.uuid4().hex,
                    replica_id=reply.replica_id,
                    incarnation=reply.incarnation,
                    policy_epoch=reply.policy_epoch,
                    metrics={"loss": 1.0 / (step + 1), "samples": 16.0, "tokens": 160.0},
                ),
            )
        )
        step, finished = answer.committed_steps, answer.finished
    client.send(api.deregister(reply.replica_id, reply.incarnation, "finished"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
