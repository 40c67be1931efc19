"""Texts and conversations to token ids, by the model's own tokenizer and chat template.

`controller.data.loss_masks` finds what is learnt of a conversation, with the token that ends a turn of the assistant.

Special tokens around a text: a chat template writes them all, and the tokenizer adds none. Without a template the
tokens that the tokenizer puts before a text (BOS, CLS) begin a prompt or conversation, once; those that it puts
behind (EOS, SEP) are left out, since the answer goes on from there, and the end token stands behind each answer.

`tokenization.loading` loads it, as it does for every other process of the job.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

import numpy as np

from controller.data.conversations import Message, as_messages
from controller.data.errors import DataError
from controller.data.loss_masks.rendered import Rendered, TokenTexts, by_blocks, lacks, marked_template
from controller.data.loss_masks.tokens import Ids, Learnt, encode_all
from controller.data.loss_masks.turns import MARKER, AssistantTurns, Mode
from schema.config import Config
from schema.config.chat_template import TemplateError, read_template
from tokenization.loading import TokenizerError, load
from tokenization.loading.source import GENERIC_CLASSES, is_own

logger = logging.getLogger(__name__)

_TESTS_NONE = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none", re.IGNORECASE)
_TURNS = "rollout.multi_turn_config."
_TOOL = "name_of_a_tool"
_marked_template = cache(marked_template)


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
            self._tokenizer = load(name, revision, trust_remote_code=trust_remote_code, key=key)
        except TokenizerError as error:
            raise DataError(str(error)) from error
        if not getattr(self._tokenizer, "is_fast", False):  # mistral-common's has no such attribute
            raise DataError(
                f"{key} = {name!r}: its tokenizer is Python code without a tokenizer.json; convert it, or name a "
                f"tokenizer that has one in policy.tokenizer_name_or_path"
            )
        if template is not None:
            self._tokenizer.chat_template = template
        self.own_template = template
        self._template: str | None = self._tokenizer.chat_template
        self._is_plain = type(self._tokenizer).__name__ in GENERIC_CLASSES and not is_own(self._tokenizer)
        self._thinking = thinking
        self._tools: list[Any] | None = None
        self._before, self._behind = self._added()
        self._opening: list[int] = []
        """The tokens that begin each prompt and conversation; none where a chat template writes them."""
        if self._template is None:
            self._opening = self._before
            logger.warning("the tokenizer of %s has no chat template: contents are used as plain text", name)
        if thinking and not self._can_think():
            logger.warning("%senable_thinking = true has no effect: the chat template ignores it", _TURNS)

    @classmethod
    def of(cls, config: Config) -> PromptTokenizer:
        """The tokenizer of `[policy]`, its own or the model's, with the job's chat template. Raises `DataError`."""
        policy, turns = config.policy, config.rollout.multi_turn_config
        key = policy.tokenizer_key
        path = turns.custom_chat_template_path
        try:
            template = read_template(config)
        except TemplateError as error:
            raise DataError(str(error)) from error
        tokenizer = cls(
            *policy.tokenizer,
            trust_remote_code=policy.trust_remote_code,
            key=key,
            template=template,
            thinking=turns.enable_thinking,
        )
        system = config.train.train_policy.system_prompt
        tokenizer._prove(f"{_TURNS}custom_chat_template_path = {path!r}" if path else f"{key}", system)
        return tokenizer

    def _prove(self, key: str, system: str) -> None:
        """One prompt with the system prompt, before any row: the template shows both. key: where it comes from."""
        asked = [*([{"role": "system", "content": system}] if system else []), *as_messages(MARKER)]
        try:
            text = self.text(asked)
        except DataError as error:
            remedy = "mend it, it gets messages, add_generation_prompt and enable_thinking"
            remedy += ", or leave train.train_policy.system_prompt out" if system else ""
            raise DataError(f"{key}: {error}; {remedy}") from error
        if MARKER not in text:
            raise DataError(f"{key}: the chat template leaves the prompt out; it must show each of `messages`")
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
        return self._prompt("?", thinking=True) != self._prompt("?", thinking=False)

    def with_tools(self, tools: list[Any] | None) -> PromptTokenizer:
        """A copy that gives these definitions to the chat template; None: none."""
        if tools is None:
            return self
        other = copy.copy(self)
        other._tools = tools
        return other

    def shows_tools(self) -> bool:
        """Whether the chat template renders definitions of tools that it gets, with a system message or without."""
        function = {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
        probe = self.with_tools([{"type": "function", **function, "function": function}])
        question = as_messages("?")
        for asked in (question, [{"role": "system", "content": "?"}, *question]):
            try:
                if _TOOL in probe.text(asked):
                    return True
            except DataError:
                with suppress(DataError):
                    self.text(asked)
                    return True  # it looks at the tools, and wants them in another form
        return False

    def prompts(self, prompts: Sequence[str | list[Message]]) -> list[Ids]:
        """Token ids of prompts, up to where the model's answer begins."""
        return self.encode([self.text(prompt) for prompt in prompts])

    def text(self, prompt: str | list[Message]) -> str:
        """A prompt in the chat template, up to where the model's answer begins."""
        return self._prompt(prompt, thinking=self._thinking)

    def _prompt(self, prompt: str | list[Message], *, thinking: bool) -> str:
        if self._template is None:
            return _contents(prompt)
        messages = _some(as_messages(prompt))
        return self._render(messages, add_generation_prompt=True, enable_thinking=thinking)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of what `text` made."""
        if not texts:
            return []
        return [np.asarray(self._begun(ids), np.int32) for ids in self._ids(texts)]

    def decode(self, ids: Ids) -> str:
        """Tokens as text, special ones too."""
        return str(self._tokenizer.decode(ids))

    def raw_ids(self, prompts: Sequence[str | list[Message]]) -> list[list[int]]:
        """Token ids of the prompts' contents alone, one after the other, without the chat template."""
        return self._ids([_contents(prompt) for prompt in prompts])

    def conversations(
        self,
        conversations: Sequence[list[Message]],
        stops: Collection[int] = (),
        unlearnt: Sequence[Collection[int]] = (),
    ) -> list[Learnt]:
        """Token ids and loss mask of whole conversations. Raises `DataError` if the template refuses one.

        stops: ids at which generation stops besides the end token. unlearnt: for each conversation the places of the
        assistant's turns that have no loss; empty: all have.
        """
        texts, without_loss = self._texts(stops), unlearnt or [()] * len(conversations)
        rendered = [
            self._rendered(messages, texts, turns)
            for messages, turns in zip(conversations, without_loss, strict=True)
        ]
        return [self._begun_too(talk) for talk in encode_all(rendered, self._ids, prefixes=self._prefixes)]

    def identity(self) -> list[str]:
        """All that its own code and its files say of it, as text: the template first."""
        tokenizer = self._tokenizer
        settings = json.dumps(tokenizer.init_kwargs, sort_keys=True, default=repr)
        return [repr(tokenizer.chat_template), settings, tokenizer.backend_tokenizer.to_str()]

    @property
    def modules(self) -> list[str]:
        """The modules of its own code; empty: transformers has its class."""
        return [type(self._tokenizer).__module__] if is_own(self._tokenizer) else []

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None: the tokenizer names none."""
        eos: int | None = self._tokenizer.eos_token_id
        return eos

    # ---- the template ---------------------------------------------------------------------------------

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, without the special tokens that the tokenizer adds."""
        if not texts:
            return []
        if self._is_plain:  # its ids alone: the class would make masks of the same length, too
            encodings = self._tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        encoded = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return [list(ids) for ids in encoded]

    def _render(self, messages: list[Message], **kwargs: Any) -> str:
        """The messages by the template, with the arguments of calls as objects or, where it refuses, as texts."""
        try:
            return self._applied(_with_arguments(messages, _as_object), **kwargs)
        except DataError:
            if any(turn.get("tool_calls") for turn in messages):
                with suppress(DataError):
                    return self._applied(_with_arguments(messages, _as_text), **kwargs)
            raise

    def _applied(self, messages: list[Message], **kwargs: Any) -> str:
        try:
            if self._tests_none:
                messages = [
                    {**turn, "content": None} if turn.get("tool_calls") and not turn["content"] else turn
                    for turn in messages
                ]
            # As a batch of one: alone, what comes before the first message could not be rendered.
            (text,) = self._tokenizer.apply_chat_template([messages], tools=self._tools, tokenize=False, **kwargs)
            return str(text)
        except Exception as error:  # jinja2 errors, and whatever the template raises by raise_exception
            raise DataError(
                f"the chat template refuses {json.dumps(messages, ensure_ascii=False)[:200]}: {error}"
            ) from error

    # ---- loss masks -----------------------------------------------------------------------------------

    def _rendered(self, messages: list[Message], texts: TokenTexts, unlearnt: Collection[int]) -> Rendered:
        """The conversation as text, with what is learnt of it. Raises `DataError`."""
        if self._template is None:
            return self._plain(messages, unlearnt)
        if self._marked is None:
            return AssistantTurns(_some(messages), self._render, texts, self._modes).rendered(unlearnt)
        text = self._render(_some(messages))
        try:
            marked = self._render(messages, chat_template=self._marked)
        except DataError as error:
            raise DataError(
                f"the chat template's {{% generation %}} blocks cannot be marked ({error}); write "
                "'{% generation %}' and '{% endgeneration %}' as tags alone, and in no string"
            ) from error
        return by_blocks(text, marked, texts, messages, unlearnt)

    def _plain(self, messages: list[Message], unlearnt: Collection[int]) -> Rendered:
        """Without a template: prompts as `prompts` makes them, each answer ended by one end token."""
        text, spans, incomplete = "", [], False
        eos = self._tokenizer.eos_token
        end = eos or "".join(self._tokenizer.convert_ids_to_tokens(self._behind))
        for i, turn in enumerate(messages):
            start, text = len(text), text + turn["content"]
            if turn["role"] == "assistant":
                text += "" if turn["content"].endswith(end) else end
                spans += [] if i in unlearnt else [(start, len(text))]
                incomplete |= lacks(turn, text[start:], thoughts=i == len(messages) - 1)
        return Rendered(text, spans, incomplete)

    @property
    def _chosen(self) -> str:
        """The template that renders: of several by name, one is for conversations with tools."""
        return str(self._tokenizer.get_chat_template(tools=self._tools))

    @property
    def _marked(self) -> str | None:
        """The template with its generation blocks marked; None: it has none."""
        return _marked_template(self._chosen)

    @property
    def _tests_none(self) -> bool:
        """Whether the template tells tool calls by a content that is null (DeepSeek)."""
        return _tests_none(self._chosen)

    @property
    def _modes(self) -> list[Mode]:
        """Variables with which the template may make a generation prompt: none, then each thinking mode."""
        modes: list[Mode] = [{}]
        if "enable_thinking" in self._chosen:
            modes += [{"enable_thinking": mode} for mode in (self._thinking, not self._thinking)]
        return modes

    def _texts(self, stops: Collection[int]) -> TokenTexts:
        added = {token: number for token, number in self._tokenizer.get_added_vocab().items() if token.strip()}
        ends = [self._tokenizer.eos_token, *(token for token, number in added.items() if number in stops)]
        special = self._tokenizer.all_special_tokens
        return TokenTexts(tuple(filter(None, ends)), tuple(special), tuple(added))

    @cached_property
    def _prefixes(self) -> bool:
        """Whether the tokenizer begins a text with a blank of its own."""
        words = self._tokenizer.convert_ids_to_tokens(self._ids(["x"])[0])
        return bool(words) and words[0].startswith(("▁", "Ġ"))

    def _begun_too(self, talk: Learnt) -> Learnt:
        """A conversation behind the tokens that begin a text."""
        if not self._opening:
            return talk
        ids = np.asarray(self._begun(talk.ids.tolist()), np.int32)
        unlearnt = np.zeros(len(ids) - len(talk.ids), np.uint8)
        return replace(talk, ids=ids, mask=np.concatenate([unlearnt, talk.mask]))

    def _begun(self, ids: list[int]) -> list[int]:
        """The tokens of a text behind those that begin one, unless it begins with them already."""
        return ids if ids[: len(self._opening)] == self._opening else [*self._opening, *ids]

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


class _Arguments(dict[str, Any]):
    """The arguments of a tool call, an object whose text is JSON, as it was given or written anew."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text


def _with_arguments(messages: list[Message], form: Callable[[Any], Any]) -> list[Message]:
    """The messages with the arguments of their tool calls in another form."""

    def formed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        inner = {key: formed(call[key]) for key in ("function",) if key in call}
        return call | inner | ({"arguments": form(call["arguments"])} if "arguments" in call else {})

    return [
        {**turn, "tool_calls": [formed(call) for call in turn["tool_calls"]]}
        if isinstance(turn.get("tool_calls"), list)
        else turn
        for turn in messages
    ]


def _as_object(arguments: Any) -> Any:
    """Arguments as an object, if they are one or its JSON text."""
    if isinstance(arguments, dict):
        return _Arguments(arguments, _as_text(arguments))
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        return arguments
    return _Arguments(values, arguments) if isinstance(values, dict) else arguments


def _as_text(arguments: Any) -> Any:
    """Arguments as JSON text, if they are an object."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


@cache
def _tests_none(template: str) -> bool:
    return _TESTS_NONE.search(template) is not None


def _some(messages: list[Message]) -> list[Message]:
    """The messages. Raises `DataError` where there is none."""
    if not messages:
        raise DataError("a conversation without a message")
    return messages


def _contents(prompt: str | list[Message]) -> str:
    return prompt if isinstance(prompt, str) else "".join(turn["content"] for turn in prompt)
