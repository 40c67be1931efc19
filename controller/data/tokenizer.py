"""Texts and conversations to token ids, by the model's own tokenizer and chat template.

The loss mask of a conversation is 1 on exactly the tokens that the assistant wrote, the token that ends its
turn included. Where it lies is taken from the template's `{% generation %}` block if it has one. Else it is
found by rendering: a turn starts where the rendering of the turns before it, with the generation prompt,
ends; and its content ends where the rendering first differs when a marker is appended to it. So templates
that rewrite the history (Qwen3 drops earlier thoughts) are right too.

Special tokens around a text: a chat template writes them all, and the tokenizer adds none. Without a template the
tokens that the tokenizer puts before a text (BOS, CLS) begin a prompt or conversation, once; those that it puts
behind (EOS, SEP) are left out, since the answer goes on from there, and the end token stands behind each answer.

`tokenization.loading` loads it, as it does for every other process of the job.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.data.conversations import Message, as_messages
from controller.data.errors import DataError
from schema.config import Config
from tokenization.loading import TokenizerError, load

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]

_TURNS = "rollout.multi_turn_config."
_MARKER = "\u2063§\u2063"  # nothing that a template would strip, split at, or contain itself


class PromptTokenizer:
    """The tokenizer of a model, with what preparation needs of it."""

    def __init__(
        self,
        name: str,
        revision: str | None = None,
        *,
        trust_remote_code: bool = False,
        key: str = "policy.model_name_or_path",
        template: str | None = None,
        thinking: bool = False,
    ) -> None:
        """key: the config key that names it, for errors. template: in place of its own.

        thinking: what prompts tell the template about its thinking mode.
        """
        try:
            self._tokenizer = load(name, revision, trust_remote_code=trust_remote_code)
        except TokenizerError as error:
            raise DataError(f"{key} = {name!r}: its tokenizer cannot be loaded: {error}") from error
        if not self._tokenizer.is_fast:
            raise DataError(f"{key} = {name!r}: its tokenizer has no tokenizer.json form")
        if template is not None:
            self._tokenizer.chat_template = template
        self._template: str | None = self._tokenizer.chat_template
        self._thinking = thinking
        self._before, self._behind = self._added()
        if self._template is None:
            logger.warning("the tokenizer of %s has no chat template: contents are used as plain text", name)
        if thinking and not self._can_think():
            logger.warning("%senable_thinking = true has no effect: the chat template ignores it", _TURNS)

    @classmethod
    def of(cls, config: Config) -> PromptTokenizer:
        """The tokenizer of `[policy]`, its own or the model's, with the job's chat template. Raises `DataError`."""
        policy, turns = config.policy, config.rollout.multi_turn_config
        own = policy.tokenizer_name_or_path is not None
        key = "policy.tokenizer_name_or_path" if own else "policy.model_name_or_path"
        path = turns.custom_chat_template_path
        found = cls(
            *policy.tokenizer,
            trust_remote_code=policy.trust_remote_code,
            key=key,
            template=_read_template(path),
            thinking=turns.enable_thinking,
        )
        system = config.train.train_policy.system_prompt
        found._prove(f"{_TURNS}custom_chat_template_path = {path!r}" if path else f"{key}", system)
        return found

    def _prove(self, key: str, system: str) -> None:
        """One prompt with the system prompt, before any row: the template shows both. key: where it comes from."""
        asked = [*([{"role": "system", "content": system}] if system else []), *as_messages(_MARKER)]
        try:
            text = self.text(asked)
        except DataError as error:
            remedy = "mend it, it gets messages, add_generation_prompt and enable_thinking"
            remedy += ", or leave train.train_policy.system_prompt out" if system else ""
            raise DataError(f"{key}: {error}; {remedy}") from error
        if _MARKER not in text:
            raise DataError(
                f"{key}: the chat template leaves the prompt out; it must show each of `messages`"
            )
        if system.strip() not in text:
            raise DataError(
                f"train.train_policy.system_prompt: the chat template of {key} leaves it out; put it into the "
                "prompts, or name a template in rollout.multi_turn_config.custom_chat_template_path"
            )
        (ids,) = self.encode([text])
        if ids[: len(self._before)].tolist() != self._before:
            logger.warning(
                "%s: the tokenizer begins plain text with %s, the chat template does not, so prompts do without",
                key,
                self._tokenizer.decode(self._before),
            )

    def _can_think(self) -> bool:
        """Whether the template renders a prompt in one way with thinking, in another without."""
        if self._template is None:
            return False
        asked = as_messages("?")
        on, off = (
            self._render(asked, add_generation_prompt=True, enable_thinking=flag) for flag in (True, False)
        )
        return on != off

    def prompts(self, prompts: Sequence[str | list[Message]]) -> list[Ids]:
        """Token ids of prompts, up to where the model's answer begins."""
        return self.encode([self.text(prompt) for prompt in prompts])

    def text(self, prompt: str | list[Message]) -> str:
        """A prompt in the chat template, up to where the model's answer begins."""
        if self._template is None:
            return _contents(prompt)
        return self._render(as_messages(prompt), add_generation_prompt=True, enable_thinking=self._thinking)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of what `text` made."""
        if not texts:
            return []
        found = self._encode(texts)["input_ids"]
        return [np.asarray(self._begun(ids) if self._template is None else ids, np.int32) for ids in found]

    def decode(self, ids: Ids) -> str:
        """Tokens as text, special ones too."""
        return str(self._tokenizer.decode(ids))

    def raw_ids(self, prompts: Sequence[str | list[Message]]) -> list[list[int]]:
        """Token ids of the prompts' contents alone, one after the other, without the chat template."""
        if not prompts:
            return []
        encoded = self._tokenizer([_contents(prompt) for prompt in prompts], add_special_tokens=False)
        return [list(map(int, ids)) for ids in encoded["input_ids"]]

    def conversations(self, conversations: Sequence[list[Message]]) -> list[tuple[Ids, Mask]]:
        """Token ids and loss mask of whole conversations. Raises `DataError` if the template refuses one."""
        if not conversations:
            return []
        if self._template is None:
            return [self._plain(messages) for messages in conversations]
        if "generation %}" in self._template.replace("-%}", "%}"):
            return self._by_generation_block(conversations)
        texts = [self._render(messages) for messages in conversations]
        encoded = self._encode(texts, offsets=True)
        return [
            (np.asarray(ids, np.int32), self._mask(ids, offsets, self._spans(messages, text), text))
            for messages, text, ids, offsets in zip(
                conversations, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
        ]

    # ---- the template ---------------------------------------------------------------------------------

    def _encode(self, texts: Sequence[str], offsets: bool = False) -> Any:
        return self._tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=offsets)

    def _render(self, messages: list[Message], **kwargs: Any) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))
        except Exception as error:  # jinja2 errors, and whatever the template raises by raise_exception
            raise DataError(
                f"the chat template refuses {json.dumps(messages, ensure_ascii=False)[:200]}: {error}"
            ) from error

    # ---- loss masks -----------------------------------------------------------------------------------

    def _by_generation_block(self, conversations: Sequence[list[Message]]) -> list[tuple[Ids, Mask]]:
        try:
            encoded = self._tokenizer.apply_chat_template(
                list(conversations), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:  # as in _render
            raise DataError(f"the chat template refuses a conversation: {error}") from error
        return [
            (np.asarray(ids, np.int32), np.asarray(mask, np.uint8))
            for ids, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        ]

    def _plain(self, messages: list[Message]) -> tuple[Ids, Mask]:
        """Without a template: prompts as `prompts` makes them, each answer ended by one end token."""
        ids: list[int] = []
        mask: list[int] = []
        eos = self._tokenizer.eos_token_id
        end = self._behind if eos is None else [eos]
        for learnt, turns in groupby(messages, lambda turn: turn["role"] == "assistant"):
            texts = [turn["content"] for turn in turns]
            for piece in self._encode(texts if learnt else ["".join(texts)])["input_ids"]:
                closed = piece[-len(end) :] == end
                ids += [*piece, *(end if learnt and not closed else [])]
                mask += [int(learnt)] * (len(ids) - len(mask))
        begun = self._begun(ids)
        return np.asarray(begun, np.int32), np.asarray([0] * (len(begun) - len(ids)) + mask, np.uint8)

    def _begun(self, ids: list[int]) -> list[int]:
        """The tokens of a text behind those that begin one, unless it begins with them already."""
        return ids if ids[: len(self._before)] == self._before else [*self._before, *ids]

    def _added(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text, and behind it."""
        special = set(self._tokenizer.all_special_tokens)
        words = (word for word in self._tokenizer.get_vocab() if word not in special)
        for text in chain(("a",), words):
            plain, whole = (
                list(self._tokenizer(text, add_special_tokens=added)["input_ids"]) for added in (False, True)
            )
            places = range(len(whole) - len(plain) + 1)
            at = next((at for at in places if whole[at : at + len(plain)] == plain), None)
            if plain and at is not None:
                return whole[:at], whole[at + len(plain) :]
        return [], []

    def _spans(self, messages: list[Message], text: str) -> list[tuple[int, int]]:
        """[start, end of content) in `text` of each turn of the assistant."""
        spans = []
        for i, turn in enumerate(messages):
            if turn["role"] != "assistant":
                continue
            start = self._turn_start(messages, i, text)
            if start is None:
                start = self._first_difference(messages, i, text, _MARKER + turn["content"])
            spans.append((start, self._first_difference(messages, i, text, turn["content"] + _MARKER)))
        return spans

    def _turn_start(self, messages: list[Message], i: int, text: str) -> int | None:
        """Where generation of turn i would begin; None if the template has no generation prompt for it."""
        if i == 0:
            return None
        before = self._render(messages[:i], add_generation_prompt=True)
        if before == self._render(messages[:i]) or not text.startswith(before):
            return None
        return len(before)

    def _first_difference(self, messages: list[Message], i: int, text: str, content: str) -> int:
        changed = self._render([*messages[:i], {**messages[i], "content": content}, *messages[i + 1 :]])
        pairs = zip(text, changed, strict=False)
        where = next((at for at, (x, y) in enumerate(pairs) if x != y), min(len(text), len(changed)))
        if where == len(text):
            raise DataError(
                f"the chat template does not show the assistant's turn {i}, so its loss mask cannot "
                "be found; give it a {% generation %} block"
            )
        return where

    def _mask(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: list[tuple[int, int]], text: str
    ) -> Mask:
        """1 on the tokens of the spans, and on the special token that ends each turn."""
        mask = np.zeros(len(ids), np.uint8)
        special = set(self._tokenizer.all_special_ids)
        for start, end in spans:
            for i, (left, right) in enumerate(offsets):
                if right <= start or left == right:
                    continue
                if left < end:
                    mask[i] = 1
                elif text[end:left].strip():
                    break
                elif ids[i] in special:
                    mask[i] = 1
                    break
        return mask


def _contents(prompt: str | list[Message]) -> str:
    return prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt)


def _read_template(path: str | None) -> str | None:
    """The file's text; None: no file is named. Raises `DataError`."""
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{_TURNS}custom_chat_template_path = {path!r} cannot be read ({error}); it must name a text file"
        ) from error
