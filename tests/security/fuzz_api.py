"""Requests made from the OpenAPI document, thrown at a real controller as each role.

    python -m tests.security.fuzz_api                            2,000 requests of each kind, progress on stderr
    python -m tests.security.fuzz_api --examples 50 --seed 7

Schemathesis makes them, right ones and wrong ones. Whatever comes, an answer is never a 5xx, is one that the
document declares, and has the body that it declares. The controller has a trainer and a rollout replica before
the fuzzing starts, and still takes a step when it is over. A failure is printed with a curl command; exit code 1.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from controller.client import calls as api
from schema.wire import messages as m
from schema.wire.frame import pack_bundle
from tests.controller.drivers import begin, train_step
from tests.support.controller import TOKENS, make_config, make_run_dir
from tests.support.served import ServedController, served_controller
from tests.support.valkey import running_valkey
from tests.support.waiting import PATIENCE

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
ENDS = ("/v1/job/fail", "/v1/job/{action}")
"""Calls that end the job: they come last, or everything after them would be refused alike."""


@contextmanager
def target() -> Iterator[ServedController]:
    """A controller in the middle of its job."""
    # Loaded when a document is read, else: Python 3.11 cannot parse a module while another thread parses one.
    importlib.import_module("schemathesis.specs.openapi.schemas")
    with tempfile.TemporaryDirectory() as folder, running_valkey() as valkey:
        run_dir = make_run_dir(Path(folder) / "run", make_config(), rows=64)
        with served_controller(run_dir, valkey.url) as served:
            yield served


def put_to_work(served: ServedController) -> dict[str, dict[str, Any]]:
    """One step is trained: there are groups, samples, publications and records. The names of things, by role."""
    with served.client("policy") as policy, served.client("rollout") as rollout:
        trainer, replica = begin(policy, rollout)
        train_step(trainer, replica, 0)
        group = replica.lease(2).groups[0]
        shared = {"group_id": group.group_id, "lease_id": group.lease_id, "step": 1, "index": 0}
        return {
            "user": {**shared, "replica_id": replica.reply.replica_id, "name": "rollout-0"},
            "rollout": {**shared, **_identity(replica.reply), "role": "rollout"},
            "policy": {
                **shared,
                **_identity(trainer.reply),
                "role": "policy",
                "policy_epoch": trainer.reply.policy_epoch,
            },
        }


def _identity(reply: m.RegisterReply) -> dict[str, Any]:
    return {"replica_id": reply.replica_id, "incarnation": reply.incarnation}


def document(served: ServedController) -> dict[str, Any]:
    """The document as it is served."""
    headers = {"authorization": f"Bearer {TOKENS['user']}"}
    answer = httpx.get(f"{served.url}/v1/openapi.json", headers=headers, trust_env=False)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def bundles() -> st.SearchStrategy[bytes]:
    """Bodies of pushes: bytes, and bundles of bytes with anything as their list of pushes."""
    texts = st.text(max_size=40) | st.sampled_from(['{"replica_id": "r", "pushes": []}', "null", "[]"])
    packed = st.builds(
        lambda frames, text: pack_bundle(frames, {"pushes": text}),
        st.lists(st.binary(max_size=64), max_size=3),
        texts,
    )
    return st.binary(max_size=256) | packed


schemathesis.openapi.media_type("application/x-safetensors", bundles())


def fuzz(
    served: ServedController, known: dict[str, dict[str, Any]], examples: int, number: int, quiet: bool = True
) -> Counter[str]:
    """Throw requests at every operation as every role; counts answers by their class. Raises on a failure.

    `known`: names of things that exist; they replace what was made up in two of three requests.
    """
    seen: Counter[str] = Counter()
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document(served)).get_all_operations()]
    operations.sort(key=lambda operation: operation.path in ENDS)
    with httpx.Client(base_url=served.url, trust_env=False, timeout=PATIENCE) as http:
        for operation in operations:
            for role, token in TOKENS.items():
                begun = time.monotonic()
                headers = {"authorization": f"Bearer {token}"}
                _fuzz_one(operation, headers, known[role], examples, number, http, seen)
                if not quiet:
                    took = time.monotonic() - begun
                    print(f"{operation.label} as {role}: {took:.1f} s", dict(seen), file=sys.stderr)
    return seen


def _fuzz_one(
    operation: Any,
    headers: dict[str, str],
    known: dict[str, Any],
    examples: int,
    number: int,
    http: httpx.Client,
    seen: Counter[str],
) -> None:
    @seed(number)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(
        case=operation.as_strategy() | operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE),
        substitute=st.integers(0, 2),
    )
    def once(case: Any, substitute: int) -> None:
        if substitute:
            _substitute(case, known)
        if isinstance(case.query, dict):
            case.query.pop("wait_s", None)  # it would be right to wait
        if operation.label == "GET /v1/events":
            case.query = {**(case.query or {}), "follow": "false"}
        if isinstance(case.body, dict) and "wait_s" in case.body:
            case.body["wait_s"] = 0.0
        response = case.call(base_url=str(http.base_url), headers=headers, timeout=PATIENCE)
        seen[f"{response.status_code // 100}xx"] += 1
        case.validate_response(response, checks=list(CHECKS))

    once()


def _substitute(case: Any, known: dict[str, Any]) -> None:
    for part in (case.path_parameters, case.query, case.body):
        if isinstance(part, dict):
            part.update({name: value for name, value in known.items() if name in part})
    if "/samples/" in case.path and case.method == "POST":
        extra = {"x-lease-id": known["lease_id"], "x-replica-id": known["replica_id"]}
        case.headers = {**(case.headers or {}), **extra}


def still_sound(served: ServedController) -> None:
    """The ledger adds up and nothing was counted that was not pushed."""
    with served.client() as user:
        ledger = user.send(api.ledger())
    assert sum(ledger.states.values()) == ledger.created
    assert ledger.max_staleness <= ledger.bound
    assert ledger.over_bound == 0


def main() -> int:
    """Fuzz for as long as asked; 0 when nothing was found."""
    parser = argparse.ArgumentParser(description="fuzz the API from its OpenAPI document")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    found = parser.parse_args()
    with target() as served:
        known = put_to_work(served)
        seen = fuzz(served, known, found.examples, found.seed, quiet=False)
        still_sound(served)
        assert m.Phase(served.job.phase)
    print(f"{sum(seen.values())} requests, nothing found: {dict(sorted(seen.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
