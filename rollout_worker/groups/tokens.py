"""The tokenizer of the model, the tokens that end an answer, and the text that rewards and people see."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rollout_worker.engines.base import EngineConfigError, Generation, SamplingSettings
from schema.config import Config, PolicyConfig, end_tokens, vocabulary
from schema.config.fetched import fetched_by, of_policy, refusal
from schema.config.modules import ExternalModuleError, import_external
from schema.config.rules.engine import never_stops, rarely_stops, tags_are_hidden
from schema.config.vocabulary import hidden_tags, never_found, shares
from schema.wire import sample_file
from schema.wire.messages import MOST_PIECES, LeasedGroup, SampleText
from tokenization.loading import TokenizerError, policy_tokenizer, special_tokens

log = logging.getLogger(__name__)

LONGEST_PIECE = 1024
"""Characters of a token's text that are kept."""


def import_modules(policy: PolicyConfig) -> None:
    """Import `policy.external_modules`, and say so where code of the model may run. Raises `EngineConfigError`."""
    try:
        import_external(policy.external_modules)
    except ExternalModuleError as error:
        raise EngineConfigError(str(error)) from error
    if policy.trust_remote_code:
        log.warning("policy.trust_remote_code = true: code of %s may run here", policy.model_name_or_path)


def refuse_models(config: Config) -> None:
    """Apply the rules that need files of the model again: `validate` may have run where they were not. Raises
    `EngineConfigError`."""
    from transformers.utils import cached_file

    if faults := refusal(config, of_policy(config, fetched_by(cached_file))):
        raise EngineConfigError(faults)


def load_tokenizer(policy: PolicyConfig) -> Any:
    """The policy's tokenizer: its own, or the model's; a warning of tags that are special tokens. Raises
    `EngineConfigError`."""
    try:
        tokenizer = policy_tokenizer(policy)
    except TokenizerError as error:
        raise EngineConfigError(str(error)) from error
    if tags := hidden_tags(special_tokens(tokenizer)):
        log.warning("%s", tags_are_hidden(policy, tags).render())
    return tokenizer


def eos_token_ids(policy: PolicyConfig, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: those of the generation config (else the model's), and the tokenizer's own."""
    from transformers.utils import cached_file

    eos_token_id = tokenizer.eos_token_id
    ids = end_tokens.eos_token_ids(
        policy, None if eos_token_id is None else int(eos_token_id), fetched_by(cached_file)
    )
    if not ids:
        path = policy.model_name_or_path
        log.warning("the model at %s names no end-of-text token: answers end at their maximal length", path)
    return ids


def stop_tokens(config: Config, tokenizer: Any) -> dict[int, str]:
    """The stop strings that are special tokens, by id; a warning of those that are a part of one.

    Raises:
        EngineConfigError: a string holds a special token and more, so that no text contains it.
    """
    strings, special = config.rollout.sampling_config.stop, special_tokens(tokenizer)
    if faults := [never_stops(*pair).render() for pair in never_found(strings, special).items()]:
        raise EngineConfigError("\n".join(faults))
    for pair in shares(strings, special).items():
        log.warning("%s", rarely_stops(*pair).render())
    return vocabulary.stop_tokens(strings, special)


def response_tokens(sample: Generation, settings: SamplingSettings) -> npt.NDArray[np.int32]:
    """The tokens whose text is the answer: all, without the token that ended it unless that is to be kept.

    This is about text alone: the sample that is trained on keeps every token.
    """
    ended_by_token = isinstance(sample.stop_reason, int)
    if ended_by_token and not settings.include_stop_str_in_output:
        return sample.token_ids[:-1]
    return sample.token_ids


def cut_stop_string(text: str, sample: Generation, settings: SamplingSettings) -> str:
    """The text without the stop string that ended it (and what its last token held beyond it)."""
    if not isinstance(sample.stop_reason, str):
        return text
    place = text.rfind(sample.stop_reason)
    if place < 0:
        return text
    kept = len(sample.stop_reason) if settings.include_stop_str_in_output else 0
    return text[: place + kept]


def texts(tokenizer: Any, samples: Sequence[Generation], settings: Sequence[SamplingSettings]) -> list[str]:
    """The answers as text, special tokens left out but for a stop string that is one and is to be kept."""
    answers = []
    for sample, how in zip(samples, settings, strict=True):
        ids = response_tokens(sample, how).tolist()
        text = cut_stop_string(tokenizer.decode(ids, skip_special_tokens=True), sample, how)
        if isinstance(sample.stop_reason, int) and how.include_stop_str_in_output:
            text += how.stop_tokens.get(sample.stop_reason, "")
        answers.append(text)
    return answers


def tokens_at(tokenizer: Any, ids: Sequence[int], characters: Iterable[int]) -> list[int]:
    """The token of an answer that each of these characters of its text ends in; the last, of what is in none."""

    def characters_of(tokens: int) -> int:
        return len(tokenizer.decode(ids[:tokens], skip_special_tokens=True))

    upto = range(1, len(ids) + 1)
    return [min(bisect_left(upto, place + 1, key=characters_of), len(ids) - 1) for place in characters]


class TextKeeper:
    """Decides which samples are kept as text, and makes it."""

    def __init__(self, config: Config, tokenizer: Any, weights: Mapping[str, Mapping[str, float]]) -> None:
        """weights: of the reward functions, by the purpose of groups."""
        self._tokenizer = tokenizer
        self._per_step, self._wanted = config.groups_per_step, config.logging.sample_groups
        self._keeps_all = bool(config.logging.samples_dir)
        short = config.reward_names
        self._weights = {
            purpose: {short[name]: weight for name, weight in names.items()} for purpose, names in weights.items()
        }

    def text(self, lease: LeasedGroup, sample: Generation, answer: str, *, failed: bool) -> str | None:
        """`SampleText` as JSON; None of a sample that is not kept. Tokens one by one are those of chosen groups."""
        chosen = lease.kind == "train" and sample_file.is_chosen(lease.group_id, self._per_step, self._wanted)
        if not (chosen or failed or lease.kind == "validation" or self._keeps_all):
            return None
        n = min(len(sample.token_ids), MOST_PIECES) if chosen else 0
        reference = lease.row.get("answer")
        text = SampleText(
            prompt=sample_file.cut(self._tokenizer.decode(lease.prompt_token_ids)),
            answer=sample_file.cut(answer),
            reference="" if reference is None else sample_file.cut(str(reference)),
            pieces=[self._piece(token) for token in sample.token_ids[:n].tolist()],
            logprobs=[round(value, 4) for value in sample.logprobs[:n].tolist()],
            versions=[
                run
                for run in zip(sample.version_starts.tolist(), sample.version_values.tolist(), strict=True)
                if run[0] < n
            ],
            weights=self._weights[lease.purpose],
        )
        return text.model_dump_json(exclude_defaults=True)

    def _piece(self, token: int) -> str:
        piece: str = self._tokenizer.decode([token])
        return piece[:LONGEST_PIECE]
