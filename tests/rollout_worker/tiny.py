"""A tiny random model with a tokenizer, on disk, and published versions of it: what the tests here run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from schema.wire.weights import Publication
from tests.weight_sync.helpers import publication_of
from weight_sync import DirectoryStore, hub_tensors, publish

SPECIAL = ["<|end|>", "<|pad|>"]


def tokenizer() -> Any:
    """Byte level, no merges: every byte is a token; ids 256 and 257 are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=SPECIAL[0], pad_token=SPECIAL[1])


def random_model(seed: int, **changes: Any) -> Any:
    """A model whose distributions are neither flat nor peaked: every filter and penalty shows."""
    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": 256,
        "pad_token_id": 257,
        "bos_token_id": None,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**fields, **changes})).eval()


def save_model(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@dataclass
class Models:
    """Two random models that take turns as weight versions, on disk and in memory."""

    folder: Path
    models: list[Any] = field(default_factory=lambda: [random_model(1), random_model(2)])

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        save_model(self.folder, self.models[0])

    def of(self, version: int) -> Any:
        return self.models[version % len(self.models)]


def publish_model(root: Path, model: Any, version: int) -> Publication:
    """Publish a model's weights in a store, as the trainer does."""
    published = publish(
        DirectoryStore(root), version=version, timeline=0, tensors=hub_tensors(model), name=f"test-{version}"
    )
    return publication_of(published, version)
