"""The recipes for GPUs fit the machines that they name, by the plan of a machine that has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.cli import cosmos

FOLDER = Path(__file__).parents[2] / "examples" / "gpu"
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 28, "hidden_act": "silu",
    "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
}  # fmt: skip
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151_936, "tie_word_embeddings": True,
    }),
    "eight": (8, {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152_064, "tie_word_embeddings": False,
    }),
}  # fmt: skip
"""GPUs of 80 GB, and what the config.json of Qwen2.5-1.5B and -7B has."""
ROOM = 0.92
"""Part of a card that a plan may fill: it leaves out fragmentation and CUDA contexts."""


@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_fits_its_machine(tmp_path: Path, name: str) -> None:
    gpus, facts = SIZES[name]
    (tmp_path / "config.json").write_text(json.dumps(QWEN | facts))
    model = ("--set", f'policy.model_name_or_path="{tmp_path}"', "--set", f'train.output_dir="{tmp_path}/out"')
    machine = ("--gpus", str(gpus), "--gpu-memory", "80", "--cores", "64", "--host-memory", "512")
    plan = json.loads(
        cosmos("--config", FOLDER / f"{name}.toml", *model, "--dry-run", *machine, "--json").says(0).stdout
    )
    used = {device: plan["used"][device] / plan["capacity"][device] for device in plan["capacity"]}
    assert used.keys() == {"host", *(f"GPU {index}" for index in range(gpus))}
    assert 0.5 < max(used.values()) < ROOM, used
    assert min(share for device, share in used.items() if device != "host") > 0.5, "no GPU is left to itself"
    words = [warning["message"] for warning in plan["warnings"]]
    assert not [text for text in words if "by default" in text or "are needed on" in text or "KV cache" in text]
