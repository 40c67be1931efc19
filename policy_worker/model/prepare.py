"""Proof that the shortcuts of this trainer are right for an architecture, before anything is trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from policy_worker.errors import SettingsError
from policy_worker.memory import activations
from policy_worker.model import attention, probe, sequence
from policy_worker.model.micro_batch import RoutingRecord
from policy_worker.model.model import AnyModel, Backbone, PolicyModel
from policy_worker.model.routing import ReplayedRouting, RoutingReplay

log = logging.getLogger(__name__)

PROBE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of two ways to the same logits: far above rounding, far below a softcap or a leak."""
PLAIN = "eager"
"""The name in transformers of the attention that computes all that a model defines."""


Found = TypeVar("Found")


Lead = Callable[[Callable[[], Any]], Any]
"""One rank decides for all (`Group.lead`)."""


def alone(decide: Callable[[], Any]) -> Any:
    """The `Lead` of a single process."""
    return decide()


def prepare_model(
    model: AnyModel,
    *,
    packed: bool,
    recompute: bool,
    parts: Sequence[str] = (),
    on_host: bool = False,
    pieces: int = 1,
    parted: bool = False,
    lead: Lead = alone,
) -> AnyModel:
    """Prove that the shortcuts of this trainer are right for this architecture, and switch it to training.

    A model that has no weights yet is proved by a small one of its architecture (see `probe`).

    recompute: whether its layers, or these parts of them alone ("attention", "experts"), are computed again in
    backward. on_host: whether what a layer keeps for its backward is in host memory.
    pieces: into how many its rows are cut (context parallelism). parted: whether ranks that share its layers have a
    part of the positions each between them (sequence parallelism).

    Raises `SettingsError`: they are not, or the model does not have these parts."""
    lm = model.lm
    lm.set_attn_implementation(lead(lambda: _prove(model, packed, pieces, parted)))
    spare_memory(model, recompute, parts, on_host)
    lm.train()
    return model


def spare_memory(model: Backbone, recompute: bool, parts: Sequence[str] = (), on_host: bool = False) -> None:
    """Let the model keep less for its backward, or elsewhere. Arguments and errors are those of `prepare_model`."""
    if recompute and not parts:
        model.lm.gradient_checkpointing_enable({"use_reentrant": False})
    for part in parts if recompute else ():
        modules = model.attentions() if part == "attention" else model.expert_blocks()
        if not modules:
            raise SettingsError(
                f"{type(model.lm).__name__} names no {part} that could be recomputed alone: write "
                f'recompute_granularity = "full" and recompute_moe_layers = false'
            )
        for module in modules:
            activations.recompute(module)
    for layer in model.decoder_layers() if on_host else ():
        activations.keep_on_host(layer)


def _prove(model: Backbone, packed: bool, pieces: int, parted: bool) -> str:
    """The name of the attention that it is to have. Raises `SettingsError` as `prepare_model`."""
    if model.weights is None:
        return _prove_on(model, packed, pieces, parted)
    return on_copy(model, lambda copy: _prove_on(copy, packed, pieces, parted, random=True))


def on_copy(model: AnyModel, find: Callable[[AnyModel], Found], layers: int = 1) -> Found:
    """Apply `find` to a small random copy of a model that has no weights yet (see `probe`); to a larger one where
    this fails in another way than by a `SettingsError`. layers: of the copy at least, of those that there are."""
    named = model._named_layers()
    for shrink in (probe.small, probe.few_layers, probe.as_it_is)[0 if named else -1 :]:
        try:
            return find(type(model)(probe.random_copy(model.lm, named, shrink, layers)))
        except SettingsError:
            raise
        except Exception as error:  # whatever an architecture makes of sizes that it was not made for
            if shrink is probe.as_it_is:
                raise
            log.info("no copy of %s by %s: %s", type(model.lm).__name__, shrink.__name__, error)
    raise AssertionError


@torch.no_grad()
def _prove_on(model: Backbone, packed: bool, pieces: int, parted: bool, *, random: bool = False) -> str:
    lm = model.lm.eval()
    refused = _use_blocks(model)
    if refused:
        log.info("prompts are computed for each sample: %s: %.300s", type(lm).__name__, refused)
        _leave_nothing_out(model)
    if parted:
        _check_parts(model, refused)
    if pieces > 1:
        _check_pieces(model, pieces, refused)
    elif packed and refused:
        _check_packing(model)
    if isinstance(model, PolicyModel):
        if random:  # at last, since with a tied head embeddings become larger too
            ids, positions = probe_of(model, 8)
            logits = lm(ids, position_ids=positions, use_cache=False).logits
            probe.enlarge_logits(lm.get_output_embeddings(), logits)
        _check_head(model)
    return str(lm.config._attn_implementation)


@torch.no_grad()
def _leave_nothing_out(model: Backbone) -> None:
    """Let the model compute its attention one operation after the other, where the one that transformers chose leaves
    out something of it, such as a cap."""
    lm, usual = model.lm, model.lm.config._attn_implementation
    ids, positions = probe_of(model, 8)
    chosen = model._hidden(ids, positions)
    try:
        lm.set_attn_implementation(PLAIN)
        error = distance(chosen, model._hidden(ids, positions))
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError) as refusal:
        log.info("the attention of %s cannot be compared: %.300s", type(lm).__name__, refusal)
        error = 0.0
    if error > PROBE_TOLERANCE[chosen.dtype]:
        log.info('the attention of %s is "%s": "%s" leaves out a part of it', type(lm).__name__, PLAIN, usual)
    else:
        lm.set_attn_implementation(usual)


@torch.no_grad()
def _check_head(model: PolicyModel) -> None:
    """Refuse an architecture that does more to its logits than `Head`: this trainer would not do it."""
    ids, positions = probe_of(model, 8)
    expected = model.lm(input_ids=ids, position_ids=positions, use_cache=False).logits
    logits = model._head().logits(model._hidden(ids, positions)[0])
    _compare(model, logits, expected[0], "logits of this architecture are not those of a linear output head")


@torch.no_grad()
def _use_blocks(model: Backbone) -> str:
    """Let the model's attention take blocks, if it then computes the same; else why it does not."""
    lm, usual = model.lm, model.lm.config._attn_implementation
    ids, positions = probe_of(model, 8)
    try:
        if usual not in (attention.NAME, attention.USUAL):
            raise ValueError(f"its attention is {usual}")
        blocks = attention.Blocks([attention.Block(0, 5, (3, 3)), attention.Block(11, 0, (8,))])
        parts = (slice(0, 8), slice(5, 8), slice(0, 8))
        row, places = (torch.cat([whole[:, part] for part in parts], 1) for whole in (ids, positions))
        with _narrow(lm, 3):
            lm.set_attn_implementation(PLAIN)
            expected = model._hidden(ids, positions)
            lm.set_attn_implementation(attention.NAME)
            in_row = model._hidden(row, places, blocks)
            for again in (in_row[:, :8], torch.cat([in_row[:, :5], in_row[:, 8:11]], 1), in_row[:, 11:]):
                _compare(model, again, expected, "sequences in one row see each other")
            _compare(model, model._hidden(ids, positions), expected, "its attention is another one")
    except (SettingsError, ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
        lm.set_attn_implementation(usual)
        return " ".join(str(error).split())
    return ""


@contextmanager
def _narrow(lm: PreTrainedModel, window: int) -> Iterator[None]:
    """Windows and chunks of attention are so narrow that a probe meets their ends."""
    holders = [lm.config.get_text_config(), *lm.modules()]
    widths = [
        (holder, name, width)
        for holder in holders
        for name in ("sliding_window", "attention_chunk_size")
        if type(width := getattr(holder, name, None)) is int
    ]
    widest = {name: max(width for _, other, width in widths if other == name) for _, name, _ in widths}
    try:
        for holder, name, width in widths:
            setattr(holder, name, window + width - widest[name])
        yield
    finally:
        for holder, name, width in widths:
            setattr(holder, name, width)


@torch.no_grad()
def _check_pieces(model: Backbone, pieces: int, refused: str) -> None:
    """Each rank has a piece of the rows: outside of the attention, a position may not depend on others."""
    key, name = "policy.parallelism.cp_size", type(model.lm).__name__
    if refused:
        raise SettingsError(f"{key} = {pieces}: sequences of {name} cannot be cut: {refused:.300}; write {key} = 1")
    ids, positions = probe_of(model, 8)
    expected = model._hidden(ids, positions)
    model.context = probe = attention.Scattered(torch.tensor([5, 1, 9, 7, 3, 11, 8, 2]), 12)
    try:
        in_pieces = model._hidden(ids, positions).index_select(1, probe.places)
    finally:
        model.context = None
    _compare(model, in_pieces, expected, f"positions see others outside of its attention; write {key} = 1")
    if any(heads % pieces for heads in probe.heads):
        fitting = [str(n) for n in range(1, min(probe.heads) + 1) if not any(h % n for h in probe.heads)]
        raise SettingsError(
            f"{key} = {pieces} does not divide the {min(probe.heads)} attention heads of {name}: write {key} = "
            f"{' or '.join(fitting)}"
        )


@torch.no_grad()
def _check_parts(model: Backbone, refused: str) -> None:
    """Between layers each rank has a part of the positions: there, a position may not depend on others."""
    name, remedy = type(model.lm).__name__, f"write {sequence.KEY} = false"
    (ids, positions), places = probe_of(model, 8), torch.tensor([5, 1, 9, 7, 3, 11, 8, 2])
    expected = model._hidden(ids, positions)
    if not refused:
        try:
            with sequence.scattered(model.lm, places, 12):
                in_parts = model._hidden(ids, positions).index_select(1, places)
        except (TypeError, AttributeError, RuntimeError, LookupError, ValueError) as error:
            refused = " ".join(str(error).split())
    if refused:
        raise SettingsError(
            f"{sequence.KEY} = true: sequences of {name} cannot be split between its layers: {refused:.300}; {remedy}"
        )
    _compare(model, in_parts, expected, f"positions see others between its layers; {remedy}")


@torch.no_grad()
def _check_packing(model: Backbone) -> None:
    """State-space and convolution layers carry state across sequences in a row, positions or not."""
    ids, positions = probe_of(model, 8)
    packed = model._hidden(ids.repeat(1, 2), positions.repeat(1, 2))[:, 8:]
    _compare(
        model, packed, model._hidden(ids, positions), "sequences in one row see each other; write "
        "train.sequence_packing = false",
    )  # fmt: skip


def probe_of(model: Backbone, length: int) -> tuple[Tensor, Tensor]:
    """Make token ids of a row, and their positions."""
    ids = torch.arange(1, length + 1)[None] * 7919 % model.vocabulary
    return ids, torch.arange(length)[None]


def _compare(model: Backbone, actual: Tensor, expected: Tensor, fault: str) -> None:
    if actual.shape != expected.shape:
        shapes = f"{tuple(actual.shape)} for {tuple(expected.shape)}"
        raise SettingsError(f"{type(model.lm).__name__} cannot be trained here: {fault} ({shapes})")
    error = distance(actual, expected)
    if not error <= PROBE_TOLERANCE[expected.dtype]:
        raise SettingsError(f"{type(model.lm).__name__} cannot be trained here: {fault} (off by {error:.3g})")


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest entry."""
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1.0))


def replay_routing(model: AnyModel, wanted: ReplayedRouting, lead: Lead = alone) -> AnyModel:
    """Let the mixtures of a model choose as recorded, from the next `RoutingReplay.begin` on. lead: proves for all
    ranks.

    Raises `SettingsError`: it has no mixtures of experts, or one whose choice cannot be answered."""
    model.routing_replay = RoutingReplay(model.lm, wanted)
    if model.weights is None:
        _prove_routing_replay(model, model.routing_replay)
    else:
        lead(lambda: on_copy(model, lambda copy: _prove_routing_replay(copy, RoutingReplay(copy.lm, wanted))))
    return model


@torch.no_grad()
def _prove_routing_replay(model: Backbone, replay: RoutingReplay) -> bool:
    """Experts get what a record says, which is not what their routers choose; and weights of these, which a router
    that leaves out groups of experts before its top k does not have."""
    ids, _ = probe_of(model, 8)
    seen: list[tuple[Tensor, ...]] = []
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1:])) for layer in replay.layers]

    def entered(record: RoutingRecord | None) -> list[Tensor]:
        """Return what experts are called with: ids and weights [1, N, M, k]."""
        seen.clear()
        replay.begin(record)
        model.lm(ids, use_cache=False)
        if len(seen) != replay.mixtures.layers or any(len(given) != 2 for given in seen):
            raise replay.refused
        return [torch.stack(column, 1)[None] for column in zip(*seen, strict=True)]

    try:
        others = (entered(None)[0] + 1).sort(-1).values % replay.mixtures.experts
        entered_ids, entered_weights = entered(RoutingRecord(others, None))
        right = torch.equal(entered_ids, others) and bool((entered_weights.abs() > 0).all())
        if replay.wanted == "weights":
            weights = torch.rand(entered_weights.shape)
            entered_ids, entered_weights = entered(RoutingRecord(others, weights))
            right &= torch.equal(entered_ids, others)
            right &= torch.equal(entered_weights, weights.to(entered_weights.dtype))
    finally:
        replay.begin(None)
        replay.take_seen()
        for hook in hooks:
            hook.remove()
    if not right:
        raise replay.refused
    return True
