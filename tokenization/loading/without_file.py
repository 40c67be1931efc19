"""Loading a tokenizer without a `tokenizer.json`: transformers makes one of its other files, by its class.

Of a SentencePiece model the ids are compared with those of its own library: classes differ in the blank that is put
before a text, in how blanks are merged, in the kind of the model that they expect. Words, digits and indentation must
have the same ids and survive; what else differs is a warning. Of other files nothing is known to compare with.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tokenization.loading.comparison import NECESSARY, PROBE, Codec, difference, lost
from tokenization.loading.source import (
    FILE,
    TokenizerError,
    TokenizerSource,
    codec_of,
    is_own,
    named,
    warn,
    warn_of_losses,
)

_MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""Names of SentencePiece models, where the class names none of its own."""
_SYMBOLS = 64
"""User-defined symbols of a SentencePiece model that are compared."""
_USER_DEFINED = 4
"""The type of such a symbol in the model."""


def of_class(source: TokenizerSource) -> Any:
    """A tokenizer by the class that transformers chooses.

    Raises:
        TokenizerError: a library is missing; it loses what is necessary, or gives it other ids than its files say.
    """
    if any(map(source.path_of, _MODELS)):
        _check_libraries()
    try:
        tokenizer = source.by_class()
    except ValueError as error:
        if "backend tokenizer" not in str(error):
            raise
        raise TokenizerError(
            f"it has no {FILE}, and none of the files (tokenizer.model, vocab.json with merges.txt, …) of the class "
            "that its settings or its model's type name; copy them from where the model was published, or name a "
            "tokenizer in policy.tokenizer_name_or_path"
        ) from error
    remedy = f"convert it to a {FILE}, or name a tokenizer that has one in policy.tokenizer_name_or_path"
    kind, losses = type(tokenizer).__name__, lost(codec_of(tokenizer, skip_special_tokens=True))
    if necessary := {kind: back for kind, back in losses.items() if kind in NECESSARY}:
        raise TokenizerError(
            f"it has no {FILE} to compare it with, and {kind} loses text: {named(necessary)}; {remedy}"
        )
    model = _SentencePiece.find(source, tokenizer)
    if model is None:
        warn(f"{source.name}: it has neither {FILE} nor a SentencePiece model to compare the ids of {kind} with")
    elif why := model.difference(tokenizer, [PROBE[kind] for kind in NECESSARY]):
        if not is_own(tokenizer):
            raise TokenizerError(f"{kind} contradicts its {model.name}: {why}; {_agreeing(source, model)}{remedy}")
        warn(f"{source.name}: its own code, {kind}, counts, which differs from {model.name}: {why}")
    elif why := model.difference(tokenizer, [*PROBE.values(), *model.symbols()]):
        warn(f"{source.name}: {kind} counts, which differs from {model.name}: {why}")
    warn_of_losses(source, tokenizer)
    return tokenizer


def _agreeing(source: TokenizerSource, model: _SentencePiece) -> str:
    """How to write a `tokenizer.json` that has the model's ids, where the class of Llama has them; else ""."""
    from transformers import LlamaTokenizer

    try:
        tokenizer = LlamaTokenizer.from_pretrained(source.name, revision=source.revision)
        if model.difference(tokenizer, [PROBE[kind] for kind in NECESSARY]):
            return ""
    except Exception:  # as in `load`
        return ""
    return (
        f"transformers.LlamaTokenizer.from_pretrained({source.name!r}) has the right ids, and its save_pretrained(…) "
        f"writes a {FILE}: do that, or "
    )


def _check_libraries() -> None:
    """Raises `TokenizerError`: what reads SentencePiece models is missing; transformers alone misreads them."""
    for library in ("sentencepiece", "google.protobuf"):
        try:
            import_module(library)
        except ImportError as error:
            raise TokenizerError(
                f"a tokenizer without {FILE} needs {library} ({error}): pip install '.[rollout]' in the checkout"
            ) from error


class _SentencePiece:
    """A SentencePiece model, as its own library reads it."""

    def __init__(self, name: str, data: bytes, settings: dict[str, Any]) -> None:
        """Raises `RuntimeError`, or what protobuf raises: it is of another kind."""
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

        self.name = name
        self._model = sentencepiece_model_pb2.ModelProto.FromString(data)
        if isinstance(adds := settings.get("add_prefix_space"), bool):
            self._model.normalizer_spec.add_dummy_prefix = adds
        self._processor = SentencePieceProcessor(model_proto=self._model.SerializeToString())

    @classmethod
    def find(cls, source: TokenizerSource, tokenizer: Any) -> _SentencePiece | None:
        """The model among the files; None: there is none, or a file of this name is of another kind."""
        names = (getattr(tokenizer, "vocab_files_names", None) or {}).values()
        for name in dict.fromkeys([*(name for name in names if str(name).endswith(".model")), *_MODELS]):
            if (path := source.path_of(name)) is not None:
                try:
                    return cls(name, path.read_bytes(), source.settings)
                except Exception:  # the base of what protobuf raises differs between its versions
                    return None
        return None

    def difference(self, tokenizer: Any, texts: list[str]) -> str:
        """Compare the ids alone: readers differ in a blank at the begin of what comes back."""
        encode = codec_of(tokenizer).encode
        return difference(Codec(encode, lambda _: ""), Codec(self._processor.encode, lambda _: ""), texts)

    def symbols(self) -> list[str]:
        """Some of the symbols that whoever made the model has defined, inside of texts."""
        pieces = [piece.piece for piece in self._model.pieces if piece.type == _USER_DEFINED]
        some = pieces[:: max(1, len(pieces) // _SYMBOLS)]
        return [f"a {text} b{text}c" for text in (piece.replace("▁", " ") for piece in some)]
