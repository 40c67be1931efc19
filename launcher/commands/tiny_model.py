"""A language model of 0.33M random parameters, written without torch: something to train where there is nothing.

A Qwen3 of two layers, and a tokenizer of bytes with `<think>`, `</think>` and `\\boxed{` as single tokens: those
are what the rewards of the addition task look for. The weights are drawn with a standard deviation of 0.06; at this
width the usual 0.02 learns nothing in the time that one wants to wait.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PAD, END = "<|pad|>", "<|end|>"
SPECIAL = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
WHOLE = ("<think>", "</think>", "\\boxed{")
LENGTH, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 256, 128, 2, 4, 2, 32, 256
DEVIATION = 0.06

# The assistant's turn stands in a generation block: supervised training learns it and nothing else.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tiny_model(out: Path, seed: int = 42) -> None:
    """Write model and tokenizer where transformers and vLLM load them. Raises OSError."""
    from safetensors.numpy import save

    out.mkdir(parents=True, exist_ok=True)
    vocabulary = len(SPECIAL) + 256 + len(WHOLE)
    (out / "model.safetensors").write_bytes(save(_weights(vocabulary, seed), metadata={"format": "pt"}))
    ids = {"eos_token_id": SPECIAL.index(END), "pad_token_id": SPECIAL.index(PAD)}
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(out / "config.json", _config(vocabulary) | ids)
    _write_json(out / "generation_config.json", ids)
    _write_json(out / "tokenizer.json", _tokenizer())
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": LENGTH,
            "clean_up_tokenization_spaces": False,
        },
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _weights(vocabulary: int, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of the hub checkpoint; the output matrix is the embeddings."""
    import numpy as np

    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (vocabulary, HIDDEN), "norm": (HIDDEN,)}
    for number in range(LAYERS):
        layer = {
            "self_attn.q_proj": (wide, HIDDEN), "self_attn.k_proj": (narrow, HIDDEN),
            "self_attn.v_proj": (narrow, HIDDEN), "self_attn.o_proj": (HIDDEN, wide),
            "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    random = np.random.default_rng(seed)
    return {
        f"model.{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else (random.standard_normal(shape, np.float32) * np.float32(DEVIATION))
        for name, shape in shapes.items()
    }


def _config(vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": vocabulary,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu",
        "attention_bias": False, "attention_dropout": 0.0, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "max_position_embeddings": LENGTH,
        "initializer_range": DEVIATION, "tie_word_embeddings": True, "bos_token_id": None, "dtype": "float32",
    }  # fmt: skip


def byte_characters() -> list[str]:
    """Map each byte to its character in a byte-level vocabulary: itself if it prints, else the next from 256 up."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, following = [], 0x100
    for byte in range(256):
        characters.append(chr(byte if byte in printing else following))
        following += byte not in printing
    return characters


def _tokenizer() -> dict[str, Any]:
    words = [*SPECIAL, *sorted(byte_characters())]
    extra = {word: len(words) + number for number, word in enumerate(WHOLE)}
    added = [(number, word, True) for number, word in enumerate(SPECIAL)]
    added += [(number, word, False) for word, number in extra.items()]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": word, **plain, "special": special} for number, word, special in added
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": [],
        },
    }
