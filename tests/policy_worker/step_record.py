"""Hashes of what steps come to: `python -m tests.policy_worker.step_record --out NEW.json --against OLD.json`.

    seventy cases, five steps each ─▶ weights, optimizer state, metrics, shown samples ─▶ NEW.json
                                                           at another commit ─▶ OLD.json ─┴─▶ equal, or what differs

A change that is to change no number is recorded before and after it. Without OLD all is trained a second time:
equal seeds give equal bits. Numbers are those of one machine. Jobs of policy replicas record their weights and the
norms of their gradients alone: who computes what is a matter of time there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from controller.client import calls as api
from policy_worker.algorithms.losses import POLICY_LOSSES
from policy_worker.parallel.rank_group import RankGroup
from policy_worker.process import RankEnvironment
from policy_worker.training.sft import HeldOut, Sft
from schema.config import Config
from schema.config.algorithms import ESTIMATORS
from tests.policy_worker.job import Job
from tests.policy_worker.material import make_trainer, sft_config, train_step, write_model
from tests.policy_worker.parallel.test_ranks import EVERYTHING, GRPO, TEACHERS, run_each, with_critic
from tests.policy_worker.player import Player
from tests.policy_worker.rank_program import digest_of
from tests.policy_worker.replicas.test_peers import REINFORCED, Crew, reinforced, several
from tests.policy_worker.training.cases import CORRECTIONS
from tests.policy_worker.training.test_sft import write_rows
from tests.support.controller import TOKENS
from tests.support.valkey import running_valkey

STEPS = 5
PARTS = ("one", "meshes", "replicas")
"""One rank; two ranks; two replicas."""
Record = dict[str, Any]

OPTIONS: dict[str, dict[str, Any]] = {
    "kl in the loss": {"kl_beta": 0.1, "unbiased_kl_estimate": True},
    "kl over the vocabulary": {"kl_beta": 0.1, "kl_type": "full", "kl_in_reward": {"beta": 0.1, "type": "full"}},
    "kl in the reward, adaptive": {
        "kl_in_reward": {"beta": 0.1, "controller": "adaptive", "target": 1e-4, "horizon": 100}
    },
    "reset reference": {"kl_beta": 0.1, "reference_reset_interval": 2, "reset_optimizer_with_reference": True},
    "everything": EVERYTHING | {"mu_iterations": 2, "batch_size_per_optimize": 5, "mini_batch_shuffle": True},
    "masks": {"sample_masks": {"truncated": True, "failed_from_tokens": 6}, "min_filter_prefix_tokens": 2},
    **{f"correction {number}": keys for number, keys in enumerate(CORRECTIONS) if keys},
}
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
MIXTURE: dict[str, Any] = {"model": {"family": "qwen3_moe"}}
MESHES: dict[str, dict[str, int | bool]] = {
    "dp": {"dp_shard": 2},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence": True},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
}


def of_one_rank() -> dict[str, Record]:
    """Options of `rank_program` by the name of the case. Every other one is packed."""
    cases: dict[str, Record] = {}
    losses, aggregations = list(POLICY_LOSSES), ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    for number, name in enumerate(ESTIMATORS):
        keys = {"advantage_estimator": name, "loss_type": aggregations[number % 3], "gamma": 0.9}
        cases[f"estimator {name}"] = {"grpo": keys, "greedy": [0.5, 1.0, -0.5] if ESTIMATORS[name].greedy else []}
    for number, name in enumerate(losses):
        cases[f"loss {name}"] = {"grpo": {"variant": name, "loss_type": aggregations[number % 3]}}
    cases |= {name: {"grpo": keys} for name, keys in OPTIONS.items()}
    for number, case in enumerate(cases.values()):
        case["train"] = {"sequence_packing": bool(number % 2)}
    teachers = {"sections": {"teacher": TEACHERS}}
    cases["teachers"] = teachers | {"train": {"ema_decay": 0.9}}
    cases["teachers, packed"] = teachers | {"grpo": EVERYTHING, "train": {"sequence_packing": True}}
    cases["adapters"] = {"sections": {"policy": {"lora": LORA}}, "grpo": {"kl_beta": 0.1}}
    critic = with_critic()[0]
    cases["critic"] = critic | {"train": {"ema_decay": 0.9}}
    cases["critic that warms up"] = critic | {"sections": {"critic": {"warmup_steps": 2, "lora": LORA}}}
    cases["experts"] = MIXTURE | {"grpo": EVERYTHING | {"routing_replay": "weights"}}
    sampling = {"n_generation": 4, "parallelism": {"tp_size": 1}, "sampling_config": {"top_k": 20, "min_tokens": 3}}
    cases["kept sets"] = {"kept_sets": True, "sections": {"rollout": sampling}}
    cases["half"] = {"train": {"param_dtype": "float16", "master_dtype": "float32"}, "scales": [64.0]}
    cases["on the host"] = {"train": {"param_dtype": "bfloat16", "fsdp_gradient_offload": True}}
    old = {"samples": {"n": 9, "version": [0, 1, 2, 3] * 2 + [0]}, "first_step": 3, "steps": 3 + STEPS}
    cases["stale samples"] = old | {"grpo": {"allowed_outdated_steps": 8, "mini_batch": 2}}
    return cases


def of_two_ranks(mesh: str) -> dict[str, Record]:
    """The same for a mesh."""
    one = of_one_rank()
    names = ["everything", "critic", "teachers, packed", "experts"]
    cases = {f"{mesh}, {name}": dict(one[name]) for name in names}
    roles = {"reference": {"dp_shard_size": 2}, "critic": {"dp_shard_size": 2}}
    if mesh in ("tp", "dp"):
        roles = roles if mesh == "tp" else {role: {"tp_size": 2, "dp_shard_size": 1} for role in roles}
        cases[f"{mesh}, roles of their own"] = {
            "grpo": with_critic()[0]["grpo"] | {"kl_beta": 0.1}, "roles": roles,
        }  # fmt: skip
    return cases


def on_ranks(directory: Path, mesh: dict[str, int | bool], cases: dict[str, Record]) -> dict[str, Record]:
    """Train these cases, one after the other in the same processes."""
    world = 1
    for name, size in mesh.items():
        world *= size if name != "sequence" else 1
    prepared = []
    for number, case in enumerate(cases.values()):
        keys = {"samples": {"n": 9, "n_masked": 1} if not case.get("greedy") else {"n": 12}, "steps": STEPS, **case}
        keys["grpo"] = GRPO | keys.get("grpo", {})
        keys["sections"] = {"logging": {"sample_groups": 4}, **keys.get("sections", {})}
        prepared.append(keys | {"mesh": mesh, "record": str(directory / f"facts-{number}")})
    found = {}
    directory.mkdir()
    results = run_each(directory / "ranks", world, prepared)
    for number, (name, (tensors, metrics)) in enumerate(zip(cases, results, strict=True)):
        facts = [json.loads(path.read_text()) for path in sorted((directory / f"facts-{number}").iterdir())]
        ordered = (tensors[key].contiguous() for key in sorted(tensors))
        found[name] = {"weights": digest_of(ordered), "metrics": metrics, "ranks": facts}
    return found


def supervised(directory: Path) -> dict[str, Record]:
    """Train on conversations, with and without held-out ones."""
    directory.mkdir()
    group, found = RankGroup(RankEnvironment()), {}
    for packed in (False, True):
        path = directory / f"rows-{packed}"
        write_rows(path, 24)
        size = {"max_token_len_per_mini_batch": 30} if packed else {"mini_batch": 3}
        config = sft_config(size, {"epoch": 9, "sequence_packing": packed, "ema_decay": 0.9})
        trainer = make_trainer(config, group)
        held_out = HeldOut(config, trainer, path, 10) if packed else None
        algorithm = Sft(config, trainer, path, held_out)
        metrics, losses = [], []
        for step in range(STEPS):
            metrics.append(train_step(algorithm, step))
            losses += [one.loss for one in algorithm.validations]
        name = f"supervised{', packed' if packed else ''}"
        found[name] = {"state": digest_of(trainer.resident()), "metrics": metrics, "losses": losses}
    group.close()
    return found


def of_replicas(directory: Path) -> dict[str, Record]:
    """Two policy replicas on a real controller. The second one joins when the first has made a step."""
    directory.mkdir()
    model = write_model(directory / "model")
    configs: dict[str, Config] = {kind: reinforced(model, kind, 10) for kind in REINFORCED}
    configs |= {exchange: several(model, steps=30, exchange=exchange) for exchange in ("collective", "store")}
    with running_valkey() as server:
        return {f"replicas, {name}": _job(directory / name, config, server.url) for name, config in configs.items()}


def _job(directory: Path, config: Config, url: str) -> Record:
    job = Job(directory, config, url)
    job.controller.start()
    crew = Crew(job)
    try:
        crew.start("policy-0")
        if config.is_grpo:
            with Player(job.controller.url, TOKENS["rollout"], groups=4) as player:
                job.wait_for(lambda: job.status().step >= 1, "a step")
                crew.start("policy-1")
                events = job.run_dir / "events.jsonl"
                job.wait_for(lambda: "policy-1.1 is live" in events.read_text(), "another replica")
                player.go_on()
                crew.finish()
                player.finish()
        else:
            crew.start("policy-1")
            crew.finish()
        assert "members=2 own_parts=1" in crew.text()
        final = job.final()
        with job.controller.client() as client:
            norms = [record.metrics["grad_norm"] for record in client.send(api.steps())]
        return {"weights": digest_of(final[name] for name in sorted(final)), "norms": norms}
    finally:
        crew.close()
        job.stop()


def record(parts: Collection[str]) -> dict[str, Record]:
    """Train all cases of these parts."""
    torch.set_num_threads(1)
    found: dict[str, Record] = {}
    with tempfile.TemporaryDirectory(prefix="step-record-") as name:
        root = Path(name)
        if "one" in parts:
            found |= on_ranks(root / "one", {"dp_shard": 1}, of_one_rank()) | supervised(root / "supervised")
        for mesh, sizes in MESHES.items() if "meshes" in parts else ():
            found |= on_ranks(root / mesh, sizes, of_two_ranks(mesh))
        if "replicas" in parts:
            found |= of_replicas(root / "replicas")
    return found


def differences(before: dict[str, Record], after: dict[str, Record]) -> list[str]:
    """List the differences, a line for each case."""
    before, after = (json.loads(json.dumps(one), parse_constant=str) for one in (before, after))  # NaN is NaN
    lines = [f"{name}: in one of them alone" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        one, other = before[name], after[name]
        parts = [part for part in sorted(one.keys() | other.keys()) if one.get(part) != other.get(part)]
        pairs = zip(one.get("metrics", ()), other.get("metrics", ()), strict=True)
        for step, (old, new) in enumerate(pairs):
            changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
            parts += [f"step {step}: {key} {old.get(key)} → {new.get(key)}" for key in changed]
        if parts:
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.devnull))
    parser.add_argument("--against", type=Path, help="another record; default: all is trained a second time")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    found = record(options.parts)
    options.out.write_text(json.dumps(found, indent=1))
    other = json.loads(options.against.read_text()) if options.against else record(options.parts)
    lines = differences({name: case for name, case in other.items() if name in found}, found)
    sys.stdout.write("\n".join([*lines, f"{len(found)} cases, {len(lines)} differ"]) + "\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
