"""verl's tables that several roles have: `checkpoint`, `profiler` and the older `profile`, and micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import (
    ABSENT,
    ConversionContext,
    Converter,
    KeyPath,
    Rule,
    When,
    computed,
    rules_below,
)
from convert.engine.values import BadValue, shown
from convert.verl.facts import ACTOR, data_parallel, lacking, widths

INFERENCE_BATCHES = "ppo_infer_micro_batch_size_per_gpu ppo_infer_max_token_len_per_gpu"
INFERENCE_REASON = "how much a pass without gradients takes at once changes no number"
_CONTENTS = ("model", "optimizer", "extra")


def checkpoint_rules(prefix: str, when: When | None = None) -> tuple[Rule, ...]:
    """`checkpoint` of a role. `contents` is what older versions call save_contents."""
    ckpt = f"{prefix}.checkpoint" if prefix else "checkpoint"
    save = f"{ckpt}.save_contents"

    def contents(context: ConversionContext) -> list[str]:
        try:
            return values.texts(context.get(save, list(_CONTENTS)))
        except BadValue:
            return list(_CONTENTS)

    def checked(names: list[str]) -> list[str]:
        for name in names:
            if name not in (*_CONTENTS, "hf_model"):
                raise BadValue(f"expected model, optimizer, extra or hf_model, got {shown(name)}")
        return names

    @computed(
        "train.ckpt.save_contents", "train.ckpt.export_safetensors", words="`hf_model` → export_safetensors"
    )
    def saved(context: ConversionContext, leaf: KeyPath) -> Result:
        names = list(_CONTENTS) if leaf.value is None else checked(values.texts(leaf.value))
        kept = [name for name in _CONTENTS if name in names] or ["model"]
        export = ("train.ckpt.export_safetensors", "hf_model" in names)
        return mapped(("train.ckpt.save_contents", kept), export, note="hf_model is export_safetensors")

    @computed(
        "train.ckpt.load_contents",
        "train.ckpt.load_schedule",
        words="unset where it is save_contents; model before hf_model; without extra the config's schedule",
    )
    def loaded(context: ConversionContext, leaf: KeyPath) -> Result:
        names = values.texts(leaf.value) if leaf.value is not None else contents(context)
        if sorted(names) == sorted(contents(context)):
            return implicit("the same as save_contents: all that was saved")
        if {"model", "hf_model"} <= set(checked(names)):  # the shards are the exact ones
            names = [name for name in names if name != "hf_model"]
        own_schedule = [] if "extra" in names else [("train.ckpt.load_schedule", False)]
        return mapped(("train.ckpt.load_contents", names), *own_schedule)

    mode = to.converted(
        "train.ckpt.save_mode",
        lambda value: "async" if values.flag(value) else "sync",
        "true → `async`, false → `sync`",
        null="",
    )
    table = {
        "save_contents": saved,
        "load_contents": loaded,
        "async_save": mode,
        "strict": to.always("every tensor is checked when it is loaded"),
        "*": lacking({}, False),
    }
    defaults = {"save_contents": list(_CONTENTS), "async_save": False} if when is None else {}
    return rules_below(ckpt, table, when, defaults, {"save_contents": ("contents",)})


def profiler_rules(prefix: str) -> tuple[Rule, ...]:
    """`profiler` of newer versions and `profile` of older ones."""
    old, new = f"{prefix}.profile", f"{prefix}.profiler"

    def on(context: ConversionContext) -> bool:
        return context.flag(f"{new}.enable") or context.flag(f"{old}.use_profile")

    @computed(words="details of verl's profilers")
    def detail(context: ConversionContext, leaf: KeyPath) -> Result:
        if not on(context):
            return implicit("no effect while the profiler is off")
        return lacking(False, [], "").run(context, leaf)

    @computed("profiler.sub_profiler_config.rank_filter", words="as they are")
    def ranks(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, []) or not on(context):
            return implicit("no effect while the profiler is off")
        if not isinstance(leaf.value, list):
            raise BadValue(f"expected a list of ranks, got {shown(leaf.value)}")
        return mapped(
            ("profiler.sub_profiler_config.rank_filter", [values.integer(rank) for rank in leaf.value])
        )

    switches = (("profiler.enable_profiler", True), ("profiler.sub_profiler_config.do_profile", True))
    switch = to.switch(*switches, words="true turns both on")
    return (
        Rule(f"{new}.enable", switch),
        Rule(f"{old}.use_profile", switch),
        Rule(f"{new}.ranks", ranks),
        Rule(f"{old}.profile_ranks", ranks),
        Rule(f"{new}.*", detail),
        Rule(f"{old}.*", detail),
    )


@dataclass(frozen=True)
class Budget:
    """The micro-batches of one pass: a size per GPU, its deprecated global twin, or a budget of tokens.

        use_dynamic_bsz false:  mini_batch = micro_batch_size_per_gpu, else micro_batch_size // data-parallel ranks
        use_dynamic_bsz true:   max_token_len_per_mini_batch = max_token_len_per_gpu * sequence-parallel size

    Full keys of verl; "" where the pass has no such key. ours: (samples, tokens).

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
    when: When | None = None

    def rules(self) -> tuple[Rule, ...]:
        """One rule per key."""
        samples, tokens = self.ours
        twin = "deprecated twin: divided by the data-parallel ranks, where the newer key is null"
        times = "times the sequence-parallel size; with dynamic batch sizes only"
        converters = {
            self.per_gpu: Converter(self._per_gpu, (samples,), "samples of one micro-batch of one rank"),
            self.whole: Converter(self._whole, (samples,), twin),
            self.switch: Converter(self._switch, self.ours, "chooses between samples and tokens"),
            self.tokens: Converter(self._tokens, (tokens,), times),
        }
        defaults = {} if self.default_tokens is None else {self.tokens: self.default_tokens}
        return tuple(
            Rule(key, converter, defaults.get(key, ABSENT), when=self.when)
            for key, converter in converters.items()
            if key
        )

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
        return self._samples(context, max(values.integer(leaf.value), 1))

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
        size = values.integer(leaf.value)
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
        own, width = values.integer(leaf.value), widths(context, self.role)["cp"]
        note = f"{own} per GPU × {width} sequence-parallel ranks" if width > 1 else ""
        return mapped((self.ours[1], own * width), note=note)
