"""A model that is on this machine: how many parameters, of which shapes, without loading it.

    directory ─▶ headers of its safetensors files ─▶ every tensor's shape      (exact)
              └▶ config.json alone ─▶ shapes of a decoder of the Llama family, or mixture of such (exact for those)

A name on the hub is looked up in the local cache of Hugging Face; nothing is downloaded.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schema.config import local_path
from schema.config.model_facts import BrokenModelError, config_file, read_config

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
PLAIN_DECODERS = {"llama", "mistral", "qwen2", "qwen3"}
MIXTURES = {"mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
"""The same with a mixture of experts in each layer."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that activations and the KV cache depend on; counts of numbers.

    intermediate: that of the experts of one token together, where there are experts.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    @property
    def kv_numbers_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LocalModel:
    """parameters: tied weights count once. layer, rest: parameters of the largest layer, and outside the layers.

    source: what they were counted from. shape: None where config.json does not have it. experts: parameters of
    experts, of all layers.
    """

    path: Path
    parameters: int
    layer: int
    rest: int
    source: str
    shape: Shape | None
    experts: int = 0


class UnknownModelError(Exception):
    """The parameters cannot be counted here; the text has the reason."""


def find_model(name: str, revision: str | None, env: Mapping[str, str]) -> LocalModel:
    """The model of a path or of a hub name. Raises UnknownModelError: not here, or not readable."""
    file = config_file(name, revision, env)
    if file is None:
        if (place := local_path(name)) is not None:
            raise UnknownModelError(f"{place / 'config.json'} cannot be read: no such file")
        raise UnknownModelError(f"{name} is not on this machine (a download would fill its cache)")
    path = file.parent
    try:
        config = read_config(file)
    except BrokenModelError as error:
        raise UnknownModelError(str(error)) from None
    text = config.get("text_config", config)
    shape = _shape(text if isinstance(text, dict) else config)
    sizes = _tensor_sizes(path)
    if sizes:
        if config.get("tie_word_embeddings") and "lm_head.weight" in sizes:
            del sizes["lm_head.weight"]  # an alias of the embeddings
        return _counted(path, sizes, "its safetensors files", shape)
    if shape is not None and config.get("model_type") in PLAIN_DECODERS | MIXTURES:
        return _counted(path, _decoder_sizes(config, shape), "its config.json", shape)
    raise UnknownModelError(f"{path} has no safetensors files, and its architecture is not a plain decoder")


def _shape(config: Mapping[str, Any]) -> Shape | None:
    def number(key: str, default: int = 0) -> int:
        value = config.get(key)
        return value if isinstance(value, int) and value > 0 else default

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    layers, vocabulary = number("num_hidden_layers"), number("vocab_size")
    of_experts = number("num_experts_per_tok") * number("moe_intermediate_size", number("intermediate_size"))
    if not (hidden and heads and layers and vocabulary):
        return None
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        intermediate=of_experts or number("intermediate_size", 4 * hidden),
        vocabulary=vocabulary,
    )


def _tensor_sizes(path: Path) -> dict[str, int]:
    """Numbers in each tensor, from the headers; empty without safetensors files."""
    sizes: dict[str, int] = {}
    try:
        for file in sorted(path.glob("*.safetensors")):
            if not file.name.startswith(("adapter", "optimizer")):
                sizes |= {name: math.prod(shape) for name, shape in _header(file).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UnknownModelError(f"a safetensors file in {path} cannot be read: {error}") from None
    return sizes


def _header(file: Path) -> dict[str, list[int]]:
    """Tensor names and shapes: eight bytes of length, then JSON."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(stream.read(length))
    return {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}


def _counted(path: Path, sizes: Mapping[str, int], source: str, shape: Shape | None) -> LocalModel:
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if match := _LAYER.search(name):
            layers[name[: match.end()]] = layers.get(name[: match.end()], 0) + size
    total = sum(sizes.values())
    rest = total - sum(layers.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return LocalModel(path, total, max(layers.values(), default=0), rest, source, shape, experts)


def _expert_sizes(config: Mapping[str, Any], shape: Shape) -> dict[str, int]:
    """The router and the experts of one layer, in place of its MLP."""
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise UnknownModelError("it has no safetensors files, and some of its layers have no experts")
    experts = config.get("num_experts") or config.get("num_local_experts")
    size = config.get("moe_intermediate_size") or config.get("intermediate_size")
    if not isinstance(experts, int) or not isinstance(size, int):
        raise UnknownModelError("it has no safetensors files, and its config.json no number or size of experts")
    shared = config.get("shared_expert_intermediate_size", 0) if config["model_type"] == "qwen2_moe" else 0
    return {
        "mlp": shape.hidden * experts + shape.hidden * (3 * shared + 1) * bool(shared),
        "mlp.experts.all": 3 * shape.hidden * size * experts,
    }


def _decoder_sizes(config: Mapping[str, Any], shape: Shape) -> dict[str, int]:
    """The tensors of a plain decoder with a gated MLP and RMS norms."""
    kind = config["model_type"]
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    has_bias = kind in ("qwen2", "qwen2_moe") or bool(config.get("attention_bias"))
    of_heads = {"qwen3": 2 * shape.head_dim, "qwen3_moe": 2 * shape.head_dim, "olmoe": wide + narrow}
    layer = {
        "attention": shape.hidden * (2 * wide + 2 * narrow),
        "mlp": 3 * shape.hidden * shape.intermediate,
        "norms": 2 * shape.hidden + of_heads.get(kind, 0),
        "bias": (wide + 2 * narrow) if has_bias else 0,
        "output_bias": shape.hidden if has_bias and not kind.startswith("qwen2") else 0,
        "mlp_bias": (2 * shape.intermediate + shape.hidden) if config.get("mlp_bias") else 0,
    }
    if kind in MIXTURES:
        layer |= _expert_sizes(config, shape)
    sizes = {f"layers.{number}.{name}": size for number in range(shape.layers) for name, size in layer.items()}
    sizes |= {"embed_tokens": shape.vocabulary * shape.hidden, "norm": shape.hidden}
    if not config.get("tie_word_embeddings", False):
        sizes["lm_head"] = shape.vocabulary * shape.hidden
    return sizes
