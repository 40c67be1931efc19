"""Writes a stored run: what a job of the checked-out code leaves when all its processes are killed at once.

    git worktree add ../old COMMIT; cd ../old      (with an environment of its own)
    PYTHONPATH=. python …/tests/policy_worker/checkpoints/stored_run_program.py …/stored_run_COMMIT.zip

Of six steps three are committed; the checkpoint is that of two, written by two ranks; a group of the fourth is ready.
The archive has the model, what a resumption reads of the run directory, `redis.json` (all records that do not expire,
bytes as latin-1) and `recorded.json`: what the controller answered before it was killed, and the type, shape and hash
of each tensor of the checkpoint, read with `safetensors` alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from controller.client import Client
from controller.client import calls as api
from tests.policy_worker.job import Job
from tests.policy_worker.material import VOCABULARY, make_config
from tests.policy_worker.player import Player
from tests.support.controller import TOKENS
from tests.support.valkey import ValkeyServer, running_valkey
from tests.support.waiting import until

STEPS, SAVED, GROUPS = 3, 2, 7
"""Committed steps, those of the checkpoint, and groups that are made: two a step."""
SHAPE: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "initializer_range": 0.15,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GRPO: dict[str, Any] = {
    "allowed_outdated_steps": 1, "advantage_estimator": "gae", "reference_reset_interval": 1,
    "kl_in_reward": {"beta": 0.1, "controller": "adaptive"},
}  # fmt: skip
"""So that a checkpoint holds a critic, a reference model, and a coefficient that has adapted."""
CKPT = {"enable_checkpoint": True, "save_freq": SAVED, "save_mode": "sync", "export_safetensors": False}


def facts_of(tensor: Tensor) -> list[Any]:
    """Type, shape and hash of a tensor."""
    data = tensor.detach().cpu().contiguous()
    return [str(data.dtype), list(data.shape), hashlib.sha256(data.numpy().tobytes()).hexdigest()[:32]]


def tensors_in(checkpoint: Path) -> dict[str, Tensor]:
    """Whole tensors by key, put together of the pieces in the files of all ranks."""
    found: dict[str, Tensor] = {}
    for path in sorted(checkpoint.glob("*-?????.safetensors")):
        with safe_open(path, "pt") as file:
            chunks = json.loads((file.metadata() or {}).get("chunks", "{}"))
            for name, (key, offsets, size) in chunks.items():
                piece = file.get_tensor(name)
                whole = found.setdefault(key, torch.zeros(size, dtype=piece.dtype))
                whole[tuple(slice(at, at + n) for at, n in zip(offsets, piece.shape, strict=True))] = piece
    return found


def records_of(server: ValkeyServer) -> dict[str, str | dict[str, str]]:
    """Every record that does not expire: a string, or a hash."""
    found: dict[str, str | dict[str, str]] = {}
    with server.client() as client:
        for key in sorted(client.keys()):
            if client.ttl(key) >= 0:
                continue
            if client.type(key) == b"hash":
                rows = client.hgetall(key)
                found[key.decode()] = {name.decode(): rows[name].decode("latin-1") for name in sorted(rows)}
            else:
                found[key.decode()] = client.get(key).decode("latin-1")
    return found


def answers_of(client: Client) -> dict[str, Any]:
    """What the controller says of the job."""
    status, ledger = client.send(api.job()), client.send(api.ledger())
    return {
        "job": status.model_dump(mode="json", include={"job_id", "step", "timeline", "publication", "version"}),
        "ledger": ledger.model_dump(mode="json"),
        "losses": [record.metrics["loss"] for record in client.send(api.steps())],
        "contents": [each.publication.content_hash for each in client.send(api.publications())],
    }


def main(archive: Path) -> None:
    work = Path(tempfile.mkdtemp())
    os.chdir(work)  # the configuration names the model by a relative path
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=VOCABULARY, **SHAPE)).save_pretrained("model")
    config = make_config(
        GRPO, {"max_num_steps": 2 * STEPS, "ema_decay": 0.9, "ckpt": CKPT},
        policy={"model_name_or_path": "model", "model_max_length": 64}, controller={"heartbeat_interval": 0.2},
    )  # fmt: skip
    with running_valkey() as server:
        job = Job(work, config, server.url)
        job.controller.start()
        ranks = job.start_policy(2)
        with Player(job.controller.url, TOKENS["rollout"], groups=GROUPS), job.controller.client() as client:
            job.wait_for_step(STEPS)
            until(lambda: client.send(api.ledger()).states["ready"] == GROUPS - 2 * STEPS, "the last group")
            answers = answers_of(client)
            for rank in ranks:
                rank.close()
            job.controller.stop()
        records = records_of(server)
    run = job.run_dir
    tensors = tensors_in(run / "checkpoints" / f"step-{SAVED:08d}")
    recorded = {**answers, "tensors": {key: facts_of(tensor) for key, tensor in sorted(tensors.items())}}
    texts = {name: json.dumps(content, indent=1) for name, content in (("redis", records), ("recorded", recorded))}
    names = ("checkpoints", "data", "weights", "config.json", "events.jsonl", "job_id")
    kept = [work / "model", *map(run.joinpath, names)]
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(found for top in kept for found in (top.rglob("*") if top.is_dir() else [top])):
            if path.is_file():
                content = path.read_bytes().replace(f"{work}/".encode(), b"")
                file.writestr(str(path.relative_to(work)), content)
        for name, text in texts.items():
            file.writestr(f"{name}.json", text.replace(f"{work}/", ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
