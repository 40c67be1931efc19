"""The shape of a model from its config.json, read without torch, transformers or the network.

    a directory ─┐
                 ├─▶ config.json ─▶ the text model's part ─▶ ModelFacts
    a hub name ──┘   (a snapshot in the local Hugging Face cache)

Workers read the same file where they have fetched it (`schema.config.fetched`): a `FindFile` says where it lies.

Only names that mean the same in every architecture are read; what is missing, of another type, or different from
layer to layer is None, and no rule speaks of it. The longest sequence is found as vLLM finds it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schema.config.paths import NotAFileError, exists, is_file, local_path, read_regular

_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_LAYERS = ("num_hidden_layers", "n_layer")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_DENSE_BETWEEN = (
    "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", "moe_layer_interval", "expert_layer_period",
    "moe_layers", "layers_block_type", "block_types",
)  # fmt: skip
"""Entries by which some layers have no experts, each in words of its own; 1 and null: all have."""
_DENSE_BEFORE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""How many first layers have none."""
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_ALREADY_SCALED = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default", "mrope"}
)
"""Kinds of rotary scaling for which the length in config.json is that after scaling (vLLM 0.32)."""
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
_CARRYING_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "hybrid_sliding"})
"""Names of layers with a state-space model, a linear attention or a convolution over the row (transformers 5.19)."""
_CARRYING_KINDS = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lfm2",
        "lfm2_moe", "mamba", "mamba2", "minimax", "minimax_text_01", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text",
        "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
    }
)  # fmt: skip
"""Architectures with such layers, for those whose config.json does not name the layers."""
_DEEP_HEADS = frozenset(
    {
        "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "modernbert-decoder",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""Architectures whose logits come of several layers after the last hidden state."""
_SENSES = ("vision_", "audio_", "image_", "speech_", "vq_", "mm_", "visual")
"""How names of entries begin that describe a part for images or sound."""
_MAX_COUNT = 2**40  # more heads, layers, words or positions than that are a mistake in the file
_MAX_BYTES = 16 * 1024 * 1024  # a config.json larger than this is something else


FindFile = Callable[[str, str | None, str], Path | None]
"""(a model's directory or hub name, its revision, a file of it) → where that file is; None: not on this machine."""


class BrokenModelError(ValueError):
    """The model's config.json cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Counts of a model; None where config.json does not say.

    longest: tokens, after rotary scaling; length_key: where it stands. has_rope: whether longer sequences are
    possible at all; learned positions simply end. experts: 0 when the model has none, None when that is not sure.
    mixtures: layers of experts. chosen: experts of one mixture that a token is sent to.
    quantised: by which method, or "". model_type: that of the whole config.json; `kind` is its text model's.
    own_code: the classes that come as code with the model. senses, architectures: parts of it that take images or
    sound, and classes, as config.json names them. has_encoder: its answers are those of a decoder that reads an
    encoder.
    carries_state: a layer carries state from token to token along a row, whatever their positions. deep_head: logits
    come of several layers after the last hidden state.
    """

    name: str
    kind: str = ""
    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    vocabulary: int | None = None
    experts: int | None = None
    mixtures: int | None = None
    chosen: int | None = None
    longest: int | None = None
    length_key: str = ""
    has_rope: bool = True
    quantised: str = ""
    model_type: str = ""
    own_code: frozenset[str] = frozenset()
    senses: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    has_encoder: bool = False
    carries_state: bool = False
    deep_head: bool = False


def local_file(name: str, revision: str | None, file: str) -> Path | None:
    """A `FindFile` that downloads nothing: `config_file` in this process's environment."""
    return config_file(name, revision, file=file)


def read_facts(
    name: str, revision: str | None, override: Mapping[str, Any], find: FindFile = local_file
) -> ModelFacts | None:
    """The facts of a model by its directory or hub name; None where it is not on this machine.

    override: entries that replace those of config.json. Raises BrokenModelError.
    """
    path = find(name, revision, "config.json")
    if path is None:
        return None
    data = {**read_config(path), **override}
    text = next((data[part] for part in _TEXT_PARTS if isinstance(data.get(part), dict)), data)
    return _facts(name, data, text)


def config_file(
    name: str, revision: str | None, env: Mapping[str, str] = os.environ, file: str = "config.json"
) -> Path | None:
    """A file of a local model, or of a hub model that the local cache (`env` says where) holds."""
    path = local_path(name)
    folder = _cached(name, revision or "main", env) if path is None else path
    candidate = None if folder is None else folder / file
    return candidate if candidate is not None and is_file(candidate) else None


def _cached(name: str, revision: str, env: Mapping[str, str]) -> Path | None:
    """A snapshot in the hub's cache, where its own library would look for it."""
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.path.expanduser(env.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
    model = cache / f"models--{name.replace('/', '--')}"
    if not exists(model):
        return None
    try:
        commit = (model / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        commit = revision  # a commit hash has no ref
    return model / "snapshots" / commit


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json. Raises BrokenModelError."""
    try:
        data = json.loads(read_regular(path, _MAX_BYTES))
    except OSError as error:
        raise BrokenModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except NotAFileError as error:
        raise BrokenModelError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BrokenModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BrokenModelError(f"{path} holds no JSON object")
    return data


def _facts(name: str, data: Mapping[str, Any], text: Mapping[str, Any]) -> ModelFacts:
    kind = text.get("model_type") or data.get("model_type")
    heads = _count(text, _HEADS)
    longest, key = _longest(text, str(kind))
    return ModelFacts(
        name=name,
        kind=_text(text, "model_type") or _text(data, "model_type"),
        heads=heads,
        kv_heads=_kv_heads(text, heads),
        layers=_count(text, _LAYERS),
        vocabulary=_count(text, ("vocab_size",)),
        experts=_experts(text, heads),
        mixtures=_mixtures(text),
        chosen=_count(text, _CHOSEN),
        longest=longest,
        length_key=key,
        has_rope="n_positions" not in text and kind != "opt",
        quantised=_quantised(data) or _quantised(text),
        model_type=_text(data, "model_type"),
        own_code=frozenset(own) if isinstance(own := data.get("auto_map"), dict) else frozenset(),
        senses=tuple(name for name in data if name.startswith(_SENSES) and isinstance(data[name], dict)),
        architectures=tuple(map(str, named)) if isinstance(named := data.get("architectures"), list) else (),
        has_encoder=data.get("is_encoder_decoder") is True,
        carries_state=_carries_state(text, str(kind)),
        deep_head=kind in _DEEP_HEADS if isinstance(kind, str) else False,
    )


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    return value if isinstance(value, str) else ""


def _carries_state(text: Mapping[str, Any], kind: str) -> bool:
    for name in _LAYER_KINDS:
        layers = text.get(name)
        if isinstance(layers, list) and layers:
            return any(isinstance(layer, str) and layer in _CARRYING_LAYERS for layer in layers)
    return kind in _CARRYING_KINDS


def _quantised(data: Mapping[str, Any]) -> str:
    table = data.get("quantization_config")
    return str(table.get("quant_method", "quantised")) if isinstance(table, dict) and table else ""


def _count(text: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these entries that is a count."""
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_COUNT:
            return value
    return None


def _kv_heads(text: Mapping[str, Any], heads: int | None) -> int | None:
    # Latent attention, and a flag that decides: other rules.
    if "kv_lora_rank" in text or "multi_query" in text:
        return None
    written = any(name in text for name in _KV_HEADS)
    return _count(text, _KV_HEADS) if written else heads


def _experts(text: Mapping[str, Any], heads: int | None) -> int | None:
    count = _count(text, _EXPERTS)
    if count is not None:
        return count
    hints = any("expert" in name or "moe" in name for name in text) or "block_configs" in text
    return None if heads is None or hints else 0


def _mixtures(text: Mapping[str, Any]) -> int | None:
    kinds, layers = text.get("mlp_layer_types"), _count(text, _LAYERS)
    if isinstance(kinds, list):
        return kinds.count("sparse") or None
    own_words = any(text.get(name) not in (None, 1) for name in _DENSE_BETWEEN)
    alone = text.get("mlp_only_layers") or []
    if layers is None or own_words or not isinstance(alone, list):
        return None
    return max(layers - len(alone) - (_count(text, _DENSE_BEFORE) or 0), 0)


def _longest(text: Mapping[str, Any], kind: str) -> tuple[int | None, str]:
    lengths = {name: value for name in _LENGTHS if (value := _count(text, (name,))) is not None}
    key = min(lengths, key=lambda name: lengths[name], default="")
    own = _count(text, ("model_max_length",))  # Command-R: it stands above the others
    if own is not None:
        return own, "model_max_length"
    if not key:
        return None, ""
    factor = 1.0 if "gemma3" in kind else max((_factor(rope) for rope in _ropes(text)), default=1.0)
    return int(lengths[key] * factor), key if factor == 1.0 else f"{key} * {factor:g}"


def _ropes(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Rotary parameters, old and new spelling; one table, or one per kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        table = text.get(name)
        if isinstance(table, dict):
            yield from (part for part in (table, *table.values()) if isinstance(part, dict))


def _factor(rope: Mapping[str, Any]) -> float:
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if not isinstance(kind, str) or kind in _ALREADY_SCALED:
        return 1.0
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        return 1.0
    return float(factor) if 1.0 <= factor <= 1e6 else 1.0
