"""verl's micro-batches: a size per GPU, its deprecated global twin, or a budget of tokens, for every pass alike.

use_dynamic_bsz false:  mini_batch = micro_batch_size_per_gpu, else micro_batch_size // data-parallel ranks
use_dynamic_bsz true:   max_token_len_per_mini_batch = max_token_len_per_gpu * sequence-parallel size
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from schema.interop.engine.rules import (
    ABSENT,
    ConversionContext,
    Converter,
    KeyPath,
    Result,
    Rule,
    as_integer,
    implicit,
    mapped,
    shown,
)
from schema.interop.verl.facts import ACTOR, data_parallel, widths


@dataclass(frozen=True)
class Budget:
    """The keys of one pass. Full keys of verl; "" where the pass has no such key. ours: (samples, tokens).

    pipeline: our key of what goes through the pipeline at once. shared: the switch that counts where the pass
    has none of its own. role: whose mesh cuts the batch.
    """

    per_gpu: str
    ours: tuple[str, str]
    pipeline: str = ""
    whole: str = ""
    switch: str = ""
    tokens: str = ""
    shared: str = f"{ACTOR}.use_dynamic_bsz"
    role: str = ACTOR
    default_tokens: int | None = None
    when: Callable[[ConversionContext], str] | None = None

    def rules(self) -> tuple[Rule, ...]:
        """One row per key."""
        samples, tokens = self.ours
        rules = [
            Rule(
                self.per_gpu,
                Converter(self._per_gpu, (samples,), "samples of one micro-batch of one rank"),
                when=self.when,
            )
        ]
        if self.whole:
            words = "deprecated twin: divided by the data-parallel ranks, where the newer key is null"
            rules.append(Rule(self.whole, Converter(self._whole, (samples,), words), when=self.when))
        if self.switch:
            words = "chooses between samples and tokens"
            rules.append(Rule(self.switch, Converter(self._switch, self.ours, words), when=self.when))
        if self.tokens:
            words = "times the sequence-parallel size; with dynamic batch sizes only"
            default = ABSENT if self.default_tokens is None else self.default_tokens
            rules.append(
                Rule(self.tokens, Converter(self._tokens, (tokens,), words), default, when=self.when)
            )
        return tuple(rules)

    def by_tokens(self, context: ConversionContext) -> bool:
        """Whether this pass cuts by tokens."""
        own = bool(self.switch) and context.has(self.switch)
        return bool(self.tokens) and context.flag(self.switch if own else self.shared)

    def token_cap(self, context: ConversionContext) -> int | None:
        """Tokens of a micro-batch, shared by the sequence-parallel ranks."""
        cap = context.integer(self.tokens, self.default_tokens) if self.tokens else None
        return None if cap is None else cap * widths(context, self.role)["cp"]

    def _per_gpu(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit("null: not set")
        if self.by_tokens(context):
            return implicit("no effect: micro-batches are cut by tokens")
        return self._samples(context, max(as_integer(leaf.value), 1))

    def _samples(self, context: ConversionContext, size: int, note: str = "") -> Result:
        """Megatron's micro-batch is what goes through the pipeline at once; ours is cut into such pieces."""
        stages = widths(context, self.role)["pp"]
        if stages == 1 or not self.pipeline:
            return mapped((self.ours[0], size), note=note)
        text = f"{size} samples through the pipeline at once, {stages} stages full"
        note = "; ".join(filter(None, (note, text)))
        return mapped((self.ours[0], size * stages), (self.pipeline, size), note=note)

    def _whole(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit(f"deprecated twin of `{self.per_gpu}`; null")
        size = as_integer(leaf.value)
        newer = context.integer(self.per_gpu, None)
        if newer is not None:
            text = f"`{leaf.key}` = {shown(size)} is the deprecated twin of `{self.per_gpu}` = {newer}"
            context.warn(f"{text}, and both are set, which verl refuses; {newer} is taken")
            return implicit(f"deprecated twin of `{self.per_gpu}`, which is set too and wins")
        if self.by_tokens(context):
            return implicit("no effect: micro-batches are cut by tokens")
        ranks = data_parallel(context, self.role)
        note = f"deprecated twin of `{self.per_gpu}`: {size} over {ranks} data-parallel ranks"
        return self._samples(context, max(size // ranks, 1), note)

    def _switch(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if not self.by_tokens(context):
            return implicit("micro-batches are cut by samples")
        cap = self.token_cap(context)
        if cap is None:
            return implicit("cut by tokens, and no budget is written: the default")
        return mapped((self.ours[1], cap), note="micro-batches are cut by tokens")

    def _tokens(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit("null: not set")
        if not self.by_tokens(context):
            return implicit("no effect: micro-batches are cut by samples")
        own, width = as_integer(leaf.value), widths(context, self.role)["cp"]
        note = f"{own} per GPU × {width} sequence-parallel ranks" if width > 1 else ""
        return mapped((self.ours[1], own * width), note=note)
