"""verl's tables that several roles have: `checkpoint`, `profiler` and the older `profile`."""

from __future__ import annotations

from typing import Any

from schema.interop.engine.rules import (
    ABSENT,
    BadValue,
    ConversionContext,
    Converter,
    KeyPath,
    Result,
    Rule,
    always,
    as_flag,
    as_integer,
    as_texts,
    implicit,
    mapped,
    shown,
)
from schema.interop.verl.facts import lacking

_CONTENTS = ("model", "optimizer", "extra")


def checkpoint_rules(prefix: str, when: Any = None) -> tuple[Rule, ...]:
    """`checkpoint` of a role. `contents` is what older versions call save_contents."""
    ckpt = f"{prefix}.checkpoint" if prefix else "checkpoint"
    save = f"{ckpt}.save_contents"

    def contents(context: ConversionContext) -> list[str]:
        try:
            return as_texts(context.get(save, list(_CONTENTS)))
        except BadValue:
            return list(_CONTENTS)

    def saved(context: ConversionContext, leaf: KeyPath) -> Result:
        names = list(_CONTENTS) if leaf.value is None else as_texts(leaf.value)
        strange = [name for name in names if name not in (*_CONTENTS, "hf_model")]
        if strange:
            raise BadValue(f"expected model, optimizer, extra or hf_model, got {shown(strange[0])}")
        kept = [name for name in _CONTENTS if name in names] or ["model"]
        export = ("train.ckpt.export_safetensors", "hf_model" in names)
        return mapped(("train.ckpt.save_contents", kept), export, note="hf_model is export_safetensors")

    def loaded(context: ConversionContext, leaf: KeyPath) -> Result:
        names = as_texts(leaf.value) if leaf.value is not None else contents(context)
        if sorted(names) == sorted(contents(context)):
            return implicit("the same as save_contents: all that was saved")
        strange = [name for name in names if name not in (*_CONTENTS, "hf_model")]
        if strange:
            raise BadValue(f"expected model, optimizer, extra or hf_model, got {shown(strange[0])}")
        if {"model", "hf_model"} <= set(names):  # the shards are the exact ones
            names = [name for name in names if name != "hf_model"]
        own_schedule = [] if "extra" in names else [("train.ckpt.load_schedule", False)]
        return mapped(("train.ckpt.load_contents", names), *own_schedule)

    def save_mode(context: ConversionContext, leaf: KeyPath) -> Result:
        return mapped(("train.ckpt.save_mode", "async" if as_flag(leaf.value) else "sync"))

    default: Any = list(_CONTENTS) if when is None else ABSENT
    return (
        Rule(
            save,
            Converter(
                saved,
                ("train.ckpt.save_contents", "train.ckpt.export_safetensors"),
                "`hf_model` → export_safetensors",
            ),
            default,
            (f"{ckpt}.contents",),
            when,
        ),
        Rule(
            f"{ckpt}.load_contents",
            Converter(
                loaded,
                ("train.ckpt.load_contents", "train.ckpt.load_schedule"),
                "unset where it is save_contents; model before hf_model; without extra the config's schedule",
            ),
            when=when,
        ),
        Rule(
            f"{ckpt}.async_save",
            Converter(save_mode, ("train.ckpt.save_mode",), "true → `async`, false → `sync`"),
            False if when is None else ABSENT,
            when=when,
        ),
        Rule(f"{ckpt}.strict", always("every tensor is checked when it is loaded"), when=when),
        Rule(f"{ckpt}.*", lacking({}, False), when=when),
    )


def profiler_rules(prefix: str) -> tuple[Rule, ...]:
    """`profiler` of newer versions and `profile` of older ones."""
    old, new = f"{prefix}.profile", f"{prefix}.profiler"
    profile = "profiler.sub_profiler_config.do_profile"

    def wanted(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value is None or not as_flag(leaf.value):
            return implicit("false: off")
        return mapped(("profiler.enable_profiler", True), (profile, True))

    def detail(context: ConversionContext, leaf: KeyPath) -> Result:
        if not (context.flag(f"{new}.enable") or context.flag(f"{old}.use_profile")):
            return implicit("no effect while the profiler is off")
        return lacking(False, [], "").run(context, leaf)

    def ranks(context: ConversionContext, leaf: KeyPath) -> Result:
        if leaf.value in (None, []) or not (
            context.flag(f"{new}.enable") or context.flag(f"{old}.use_profile")
        ):
            return implicit("no effect while the profiler is off")
        if not isinstance(leaf.value, list):
            raise BadValue(f"expected a list of ranks, got {shown(leaf.value)}")
        return mapped(("profiler.sub_profiler_config.rank_filter", [as_integer(rank) for rank in leaf.value]))

    switch = Converter(wanted, ("profiler.enable_profiler", profile), "true turns both on")
    filtered = Converter(ranks, ("profiler.sub_profiler_config.rank_filter",), "as they are")
    other = Converter(detail, (), "details of verl's profilers")
    return (
        Rule(f"{new}.enable", switch),
        Rule(f"{old}.use_profile", switch),
        Rule(f"{new}.ranks", filtered),
        Rule(f"{old}.profile_ranks", filtered),
        Rule(f"{new}.*", other),
        Rule(f"{old}.*", other),
    )
