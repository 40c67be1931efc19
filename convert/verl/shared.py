"""verl's tables of several roles: `model`, `checkpoint`, `profiler` and the older `profile`, and micro-batches."""

from __future__ import annotations

from typing import Any

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped
from convert.engine.rules import ConversionContext, KeyPath, Rule, When
from convert.engine.values import BadValue, shown
from convert.verl.facts import ACTOR, KEYS, MODEL, data_parallel, is_megatron, lacking, widths
from schema.config.overrides import is_dropout

_CONTENTS = ("model", "optimizer", "extra")


def _contents(context: ConversionContext, leaf: KeyPath) -> list[str]:
    """Return what `save_contents` of the same table names."""
    try:
        return values.texts(context.get(f"{leaf.key.rpartition('.')[0]}.save_contents", list(_CONTENTS)))
    except BadValue:
        return list(_CONTENTS)


def _checked(names: list[str]) -> list[str]:
    for name in names:
        if name not in (*_CONTENTS, "hf_model"):
            raise BadValue(f"expected model, optimizer, extra or hf_model, got {shown(name)}")
    return names


def _saved(context: ConversionContext, leaf: KeyPath) -> Result:
    names = list(_CONTENTS) if leaf.value is None else _checked(values.texts(leaf.value))
    kept = [name for name in _CONTENTS if name in names] or ["model"]
    return leaf.to(kept, "hf_model" in names, note="hf_model is export_safetensors")


def _loaded(context: ConversionContext, leaf: KeyPath) -> Result:
    saved = _contents(context, leaf)
    names = saved if leaf.value is None else values.texts(leaf.value)
    if sorted(names) == sorted(saved):
        return implicit("the same as save_contents: all that was saved")
    if {"model", "hf_model"} <= set(_checked(names)):  # the shards are the exact ones
        names = [name for name in names if name != "hf_model"]
    return leaf.to(names) if "extra" in names else leaf.to(names, False)


def _save_mode(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to("async" if values.flag(leaf.value) else "sync")


def _profiles(context: ConversionContext, leaf: KeyPath) -> bool:
    """Whether the profiler of the role is on, by the newer table or the older one."""
    role = leaf.key.partition(".profile")[0]
    return context.flag(f"{role}.profiler.enable") or context.flag(f"{role}.profile.use_profile")


def _profiler_detail(context: ConversionContext, leaf: KeyPath) -> Result:
    if not _profiles(context, leaf):
        return implicit("no effect while the profiler is off")
    return lacking(False, [], "").run(context, leaf)


def _ranks(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, []) or not _profiles(context, leaf):
        return implicit("no effect while the profiler is off")
    if not isinstance(leaf.value, list):
        raise BadValue(f"expected a list of ranks, got {shown(leaf.value)}")
    return leaf.to([values.integer(rank) for rank in leaf.value])


class Budget:
    """Names that the rows of the micro-batches of one pass use: a size per GPU, its older twin, or tokens.

        use_dynamic_bsz false:  mini_batch = micro_batch_size_per_gpu, else micro_batch_size // data-parallel ranks
        use_dynamic_bsz true:   max_token_len_per_mini_batch = max_token_len_per_gpu * sequence-parallel size

    table: of the keys, whose names begin with `start`. ours: the section of our keys. switch, tokens: names, "" where
    the pass has none. pipeline: our key of what goes through the pipeline at once. role: whose mesh cuts the batch.
    """

    def __init__(
        self,
        table: str,
        start: str,
        ours: str,
        *,
        samples: str = "mini_batch",
        switch: str = "use_dynamic_bsz",
        tokens: str = "$max_token_len_per_gpu",
        pipeline: str = "",
        role: str = ACTOR,
        default_tokens: int | None = None,
        when: When | None = None,
    ) -> None:
        self.table, self.start, self.pipeline, self.role, self.when = table, start, pipeline, role, when
        self.samples, self.most = f"{ours}.{samples}", f"{ours}.max_token_len_per_mini_batch"
        self.per_gpu_key = f"{table}.{start}micro_batch_size_per_gpu"
        self.switch_name, self.tokens_name = switch, tokens.replace("$", start)
        self.cut, self.default_tokens = "tokens" if tokens else "samples", default_tokens
        self.default_text = "" if default_tokens is None else f" = {default_tokens}"

    def by_tokens(self, context: ConversionContext) -> bool:
        """Whether this pass cuts by tokens."""
        own = f"{self.table}.{self.switch_name}"
        return self.cut == "tokens" and context.flag(own if context.has(own) else f"{ACTOR}.use_dynamic_bsz")

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
            return mapped((self.samples, size), note=note)
        text = f"{size} samples through the pipeline at once, {stages} stages full"
        note = "; ".join(filter(None, (note, text)))
        return mapped((self.samples, size * stages), (self.pipeline, size), note=note)

    def _whole(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit(f"deprecated twin of `{self.per_gpu_key}`; null")
        size = values.integer(leaf.value)
        newer = context.integer(self.per_gpu_key, None)
        if newer is not None:
            text = f"`{leaf.key}` = {shown(size)} is the deprecated twin of `{self.per_gpu_key}` = {newer}"
            context.warn(f"{text}, and both are set, which verl refuses; {newer} is taken")
            return implicit(f"deprecated twin of `{self.per_gpu_key}`, which is set too and wins")
        if self.by_tokens(context):
            return implicit("no effect: micro-batches are cut by tokens")
        ranks = data_parallel(context, self.role)
        note = f"deprecated twin of `{self.per_gpu_key}`: {size} over {ranks} data-parallel ranks"
        return self._samples(context, max(size // ranks, 1), note)

    def _by_tokens_or_samples(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if not self.by_tokens(context):
            return implicit("micro-batches are cut by samples")
        cap = context.integer(f"{self.table}.{self.tokens_name}", self.default_tokens)
        if cap is None:
            return implicit("cut by tokens, and no budget is written: the default")
        return mapped((self.most, cap * widths(context, self.role)["cp"]), note="micro-batches are cut by tokens")

    def _tokens(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None:
            return implicit("null: not set")
        if not self.by_tokens(context):
            return implicit("no effect: micro-batches are cut by samples")
        own, width = values.integer(leaf.value), widths(context, self.role)["cp"]
        note = f"{own} per GPU × {width} sequence-parallel ranks" if width > 1 else ""
        return leaf.to(own * width, note=note)


def budget(*arguments: Any, **named: Any) -> tuple[Rule, ...]:
    """The rules of the micro-batches of one pass; the arguments are those of `Budget`."""
    return KEYS.rules("budget", Budget(*arguments, **named))


_MEGATRON_LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def model(prefix: str, ours: str, when: When | None = None, old_path: str = "") -> tuple[Rule, ...]:
    """The rules of one model. prefix: its table in verl. ours: `policy` or `critic`. old_path: spelling of `path`."""
    return KEYS.rules("model", Model(prefix, ours, when, old_path), globals())


class Model:
    """Names that the rows of one model use; see `model`."""

    def __init__(self, prefix: str, ours: str, when: When | None, old_path: str) -> None:
        self.prefix, self.ours, self.when, self.old_path = prefix, ours, when, old_path
        self.train = "train" if ours == "policy" else ours
        self.packed = "the policy" if ours == "policy" else "others"

    def _lora(self, context: ConversionContext) -> bool:
        """Whether the model gets adapters by FSDP's key."""
        return (context.integer(f"{self.prefix}.lora_rank", 0) or 0) > 0

    def _megatron_lora(self, context: ConversionContext) -> bool:
        """Whether it gets them by Megatron's."""
        return (context.integer(f"{self.prefix}.lora.rank", 0) or 0) > 0

    def _only_megatron_lora(self, context: ConversionContext) -> bool:
        return self._megatron_lora(context) and not self._lora(context)

    def _tokenizer(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is not None and leaf.value == context.get(f"{self.prefix}.path", None):
            return implicit("the tokenizer of the model itself")
        return to.path(leaf.ours[0]).run(context, leaf)

    def _trust(self, context: ConversionContext, leaf: KeyPath) -> Result:
        data = self.prefix == MODEL and context.flag("data.trust_remote_code")
        value = leaf.value is not None and values.flag(leaf.value)
        note = "data.trust_remote_code is true, and there is one key per model" if data and not value else ""
        return leaf.to(value or data, note=note)

    def _override(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or leaf.value == {}:
            return implicit("nothing is overridden")
        if is_dropout(leaf.rest):
            return implicit("dropout is off in training: log-probs would be of another model")
        return mapped((f"{leaf.ours[0]}.{leaf.rest}", leaf.value))

    def _rank(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or values.integer(leaf.value) <= 0:
            return implicit("rank 0: all weights are trained")
        return leaf.to(values.integer(leaf.value))

    def _nested_rank(self, context: ConversionContext, leaf: KeyPath) -> Result:
        if self._lora(context):
            return implicit("lora_rank is set and counts")
        return self._rank(context, leaf)

    def _packing(self, context: ConversionContext, leaf: KeyPath) -> Result:
        own = f"{ACTOR}.megatron.use_remove_padding"
        if self.prefix == MODEL and is_megatron(context) and context.has(own):
            return implicit(f"`{own}` counts with Megatron")
        return to.flag("train.sequence_packing").run(context, leaf)


def _targets(context: ConversionContext, leaf: KeyPath) -> Result:
    return leaf.to("all-linear" if leaf.value == "all-linear" else values.texts(leaf.value))


def _megatron_targets(context: ConversionContext, leaf: KeyPath) -> Result:
    names = values.texts(leaf.value)
    if sorted(names) == sorted(_MEGATRON_LINEAR):
        return leaf.to("all-linear", note="every linear layer")
    return leaf.to(names, note="names of Megatron's modules: write the hub's")


def _modules(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value in (None, "", []):
        return implicit("null: none")
    names = [part.strip() for text in values.texts(leaf.value) for part in text.split(",")]
    return leaf.to([name for name in names if name])
