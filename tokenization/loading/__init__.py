"""Loading a tokenizer: every process of a job loads it alike, compared with its files.

transformers takes a class by `tokenizer_config.json` or by the model's type, and most of its classes build their own
pre-tokenizer and decoder in place of those of the files. A model that is labelled with a class of another family then
loses spaces, or gets other ids, without an error. So ids and round trips of the probe texts (`comparison`) are
compared with what the libraries of the files make of them:

    with_file      `tokenizer.json`, as the tokenizers library reads it: it counts, and what differs is a warning
    without_file   a SentencePiece model, as its library reads it: what differs is refused, or a warning

What differs is a warning once in a process. Imports take 0.7 s where `tokenizer_config.json` names the generic class
(torch stays out), about 4 s where another class is needed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from schema.config import PolicyConfig
from schema.config.modules import remedy
from tokenization.loading.source import FILE, SETTINGS, TokenizerError, TokenizerSource, is_own, named_tokens
from tokenization.loading.with_file import of_file
from tokenization.loading.without_file import of_class

__all__ = ["TokenizerError", "load", "policy_tokenizer", "special_tokens", "write_plain"]


def policy_tokenizer(policy: PolicyConfig) -> Any:
    """The policy's tokenizer, its own or the model's, by `load`. Raises `TokenizerError` that names its key."""
    return load(*policy.tokenizer, trust_remote_code=policy.trust_remote_code, key=policy.tokenizer_key)


def load(name: str, revision: str | None = None, *, trust_remote_code: bool = False, key: str = "") -> Any:
    """A tokenizer of transformers whose ids and texts are those of its files.

    Args:
        name: a directory, or a name on the hub, which is read from the cache or downloaded.
        revision: of the hub's repository; None: its default branch.
        trust_remote_code: whether code that comes with the tokenizer may run.
        key: of the configuration, that names it, for errors.

    Raises:
        TokenizerError: transformers is missing, the files are absent, damaged or need code that is not trusted; or
            `tokenizer.json` is absent, and words, digits or indentation do not survive.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    of_key = f"{key} = {name!r}: its tokenizer cannot be loaded: " if key else ""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise TokenizerError(
            f"{of_key}transformers is missing ({error}): pip install '.[rollout]' in the checkout"
        ) from error
    try:
        source = TokenizerSource.find(name, revision, trust_remote_code)
        return of_class(source) if source.file is None else of_file(source, source.file)
    except TokenizerError as error:
        raise TokenizerError(f"{of_key}{error}") from error
    except Exception as error:  # the tokenizers library raises no other, and code of others may raise any
        raise TokenizerError(f"{of_key}{error or type(error).__name__}{remedy(error)}") from error


def write_plain(tokenizer: Any, directory: Path) -> bool:
    """Write a loaded tokenizer so that whoever loads it from there, by whichever class, gets the same ids and texts.

    False, and nothing is written, for a tokenizer whose own code makes its ids: only its files hold that code.

    Raises:
        OSError: the directory cannot be written.
    """
    if is_own(tokenizer) or not tokenizer.is_fast:
        return False
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": bool(tokenizer.clean_up_tokenization_spaces),
        **{name: str(token) for name, token in named_tokens(tokenizer)},
    }
    (directory / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    # vLLM waits seconds for a model's type; of this one, transformers takes the generic class.
    (directory / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return True


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Special tokens of a loaded tokenizer, added and named ones, with their ids. Texts leave them out."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
