"""Small tokenizers of each family, trained on a few lines, as `tokenizer.json` and settings of any label."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = ["The answer is 18. def f(x):\n    return x  # 1,000 + 24\n", "isn't it? naïve café 数学 答案 \t tab"] * 9
SPECIAL = ("<unk>", "<s>", "</s>", "<|user|>")
TEXT = "The answer is\n#### 18\n  if x:\n\treturn 数学  é"


def _trained(backend: Tokenizer, kind: Callable[..., Any], **settings: Any) -> Tokenizer:
    tokens = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    backend.train_from_iterator(CORPUS, kind(special_tokens=tokens, show_progress=False, **settings))
    return backend


def byte_level() -> Tokenizer:
    """As GPT-2 and Llama 3; composed, as Qwen."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(backend, trainers.BpeTrainer, vocab_size=340, initial_alphabet=alphabet)


def metaspace() -> Tokenizer:
    """As Llama 2: words begin with ▁, unknown characters are bytes."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    trained = json.loads(_trained(backend, trainers.BpeTrainer, vocab_size=80).to_str())
    vocabulary = trained["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    backend = Tokenizer.from_str(json.dumps(trained))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def word_piece() -> Tokenizer:
    """As BERT: spaces are lost, and so is the case."""
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))  # type: ignore[call-arg]
    backend.normalizer, backend.pre_tokenizer = (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer())
    backend.decoder = decoders.WordPiece()
    return _trained(backend, trainers.WordPieceTrainer, vocab_size=120)


def unigram() -> Tokenizer:
    """As T5: runs of spaces become one."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _trained(backend, trainers.UnigramTrainer, vocab_size=120, unk_token="<unk>")


FAMILIES = {family.__name__: family for family in (byte_level, metaspace, word_piece, unigram)}


def save(
    directory: Path,
    family: str,
    label: str | None = None,
    model_type: str = "llama",
    before: str = "",
    **settings: Any,
) -> Path:
    """Save a tokenizer labelled with a class, and its model's type. before: what its post-processor puts before a
    text. Without settings there is no `tokenizer_config.json`."""
    directory.mkdir()
    backend = FAMILIES[family]()
    if before:
        known = [(token, backend.token_to_id(token)) for token in SPECIAL]
        backend.post_processor = processors.TemplateProcessing(single=f"{before} $A", special_tokens=known)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings |= {"tokenizer_class": label} if label else {}
    if settings:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def of_file(directory: Path) -> Tokenizer:
    """What the tokenizers library alone reads there."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
