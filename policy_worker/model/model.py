"""The models that are trained: a transformers causal LM, asked for log-probs of given tokens instead of logits; and a
critic, its like with one number for each position in the place of logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PretrainedConfig, PreTrainedModel

from policy_worker.errors import SettingsError
from policy_worker.memory import activations
from policy_worker.model import attention, probe, sequence
from policy_worker.model.attention import Block, Blocks, Context, Outputs
from policy_worker.model.logprobs import Beside, Head, TokenOutputs, VocabularyShard, token_logprobs
from policy_worker.model.micro_batch import MicroBatch, Routing
from policy_worker.model.pretrained import Weights

if TYPE_CHECKING:
    from policy_worker.model.routing import Replay
    from policy_worker.model.stages import Entry, Stages

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROBE_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of two ways to the same logits: far above rounding, far below a softcap or a leak."""


FACTORS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""What configurations call the number by which logits are multiplied, divided, or at which they are capped."""
More = Callable[[Tensor, Head], Any]
"""What else is computed of hidden states [K, D] and the output head, of each token: see `PolicyModel.forward`."""
MULTIPLIES_BY_DIVISOR = frozenset({"hyperclovax"})
"""Kinds of models that multiply by `logits_scaling`."""


class Backbone(nn.Module):
    """A transformers model up to its last hidden states; `forward` of its kinds is the one way in, since sharding
    strategies hook on to it."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.weights: Weights | None = None
        """Where they are to be read; None: it has them."""
        self.context: Context | None = None
        """Whose piece of the rows this process has; None: they are whole."""
        self.stages: Stages | None = None
        """Those of a pipeline that are left of the model; None: it is whole."""
        self.gather: sequence.Exchange | None = None
        """Of this process' part of the last hidden states all positions (see `sequence`); None: it has them."""
        self.replay: Replay | None = None
        """Of what the engine's routers chose; None: those of the model choose."""
        self.reduces_late = False
        """Whether gradients are reduced after backward, and not within it (see `fsdp`)."""

    def read_weights(self, device: torch.device) -> Self:
        """Read this rank's part of the weights to a device; a model that has them stays where it is."""
        if self.weights is not None:
            self.weights.fill(self.lm, device)
            self.weights = None
        return self

    def _hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        blocks: Sequence[Block] = (),
        entry: Entry | None = None,
    ) -> Tensor:
        """[R, L, D], or of this process' piece of the rows [R, L / n, D].

        No mask and no cache: sequences in a row are kept apart by blocks, or by their positions.

        entry: the stage that runs, of a model that is cut into some; those before the last end before the norm, and
        have a part of the positions alone where these are split between layers.
        """
        more: dict[str, Any] = {"blocks": Blocks(blocks)} if blocks and self.takes_blocks else {}
        if self.context is not None:
            input_ids, position_ids = self.context.cut(input_ids), self.context.cut(position_ids)
            more["context"] = self.context
        if entry is None or entry.received is None:
            more["input_ids"] = input_ids
        else:
            more["inputs_embeds"] = entry.received
        outputs = self.lm.base_model(position_ids=position_ids, attention_mask=None, use_cache=False, **more)
        if entry is not None and not entry.is_last:
            return cast(Tensor, entry.passed)
        last = cast(Tensor, outputs.last_hidden_state)
        return last if self.gather is None else self.gather(last)

    def _of_batch(self, batch: MicroBatch, entry: Entry | None) -> Tensor:
        """The states that predict the batch's labels, [K, D], of this process' piece [k, D]; those behind a stage
        before the last, see `_hidden`."""
        if entry is not None:
            assert self.stages is not None
            self.stages.layers.entry = entry
        self.recall(batch)
        hidden = self._hidden(batch.input_ids, batch.position_ids, batch.blocks, entry)
        return (
            hidden.flatten(0, 1).index_select(0, batch.of_piece(batch.index))
            if goes_to_head(entry)
            else hidden
        )

    def recall(self, batch: MicroBatch, *, again: bool = False) -> None:
        """What is computed next is of this micro-batch. again: its backward, where others came between."""
        if self.replay is None:
            return
        routing = batch.routing
        if routing is not None and self.context is not None:
            cut = self.context.cut
            routing = Routing(cut(routing.ids), None if routing.weights is None else cut(routing.weights))
        self.replay.begin(routing, again=again)

    def _of_all(self, found: Outputs, batch: MicroBatch) -> Outputs:
        """Of outputs of the picked states, those of the batch's K labels."""
        return found if self.context is None else self.context.gather(found, batch.pieces)

    @property
    def takes_blocks(self) -> bool:
        """Whether its attention takes blocks (see `attention`)."""
        return bool(self.lm.config._attn_implementation == attention.NAME)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that have an embedding. Asked before the model is sharded."""
        return int(self.lm.get_input_embeddings().weight.shape[0])

    def decoder_layers(self) -> list[nn.Module]:
        """The repeated blocks, in order: what is sharded and recomputed as a unit.

        Raises:
            SettingsError: the model does not say which they are.
        """
        layers = self._named_layers()
        if not layers:
            raise SettingsError(
                f"{type(self.lm).__name__} does not name its decoder layers: it cannot be sharded"
            )
        return layers

    def _named_layers(self) -> list[nn.Module]:
        names = set(self.lm._no_split_modules or ())
        return [m for m in self.lm.modules() if type(m).__name__.removeprefix("FSDP") in names]

    def attentions(self) -> list[nn.Module]:
        """The attention of each layer that has one. Raises as `decoder_layers`."""
        found: list[nn.Module] = []
        for layer in self.decoder_layers():
            named = [
                m for m in layer.modules() if type(m).__name__.removeprefix("FSDP").endswith("Attention")
            ]
            inner = {m for one in named for m in one.modules() if m is not one}
            found += [m for m in named if m not in inner]
        return found

    def expert_blocks(self) -> list[nn.Module]:
        """Layers of experts, each with its router and shared experts."""
        names = [name for name, style in sequence.layers_of(self.lm).items() if style == sequence.EXPERTS]
        return [self.lm.get_submodule(name.rpartition(".")[0]) for name in names]

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices of the layers: what Muon is for. Raises as `decoder_layers`."""
        return [p for layer in self.decoder_layers() for p in layer.parameters() if p.ndim == 2]


def goes_to_head(entry: Entry | None) -> bool:
    """Whether a forward ends with the head: that of a whole model, or of the last stage."""
    return entry is None or entry.is_last


class ValueModel(Backbone):
    """A critic: what it expects the tokens after a position to earn, one number for each. At first it expects 0."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        embeddings = lm.get_input_embeddings().weight
        width = lm.config.get_text_config().hidden_size
        self.value_head = nn.Parameter(torch.zeros(width, dtype=embeddings.dtype))

    def forward(self, batch: MicroBatch, entry: Entry | None = None) -> Tensor:
        """The value of what stands before each of the batch's K labels, [K], float32 (float64 for float64).

        entry: see `PolicyModel.forward`.
        """
        picked = self._of_batch(batch, entry)
        if not goes_to_head(entry):
            return picked
        accurate = torch.promote_types(picked.dtype, torch.float32)
        return self._of_all(picked.to(accurate) @ self.value_head.to(accurate), batch)


class PolicyModel(Backbone):
    """The policy, a reference model, or any other of whose tokens log-probs are asked for."""

    def __init__(self, lm: PreTrainedModel, dropout: dict[str, float] | None = None) -> None:
        """dropout: what the model's configuration said before it was switched off, for the export."""
        super().__init__(lm)
        self.dropout = dropout or {}
        self.vocabulary_shard: VocabularyShard | None = None
        """Which rows of the output head this rank has, if not all."""
        self._logits_form = _logits_form(lm.config)

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        beside: Beside | None = None,
        with_hidden: bool = False,
        more: More | None = None,
        entry: Entry | None = None,
    ) -> TokenOutputs | Tensor:
        """Log-prob, entropy and correctness of the batch's K labels under softmax(logits / temperature), or what
        `MicroBatch.drawn` makes of it.

        more: computes `TokenOutputs.more` of the hidden states and the output head, which are whole nowhere else;
            where rows are cut, of the tokens of this process' piece.
        entry: the stage that runs, of a model that is cut into some; one before the last gives its states.
        """
        picked = self._of_batch(batch, entry)
        if not goes_to_head(entry):
            return picked
        labels = batch.of_piece(batch.labels)
        found = token_logprobs(picked, self._head(), labels, temperature, drawn=batch.drawn, compared=beside)
        if more is not None:
            found = found._replace(more=more(picked, self._head()))
        return self._of_all(found._replace(hidden=picked) if with_hidden else found, batch)

    def whole_head(self) -> Head:
        """The output head between forwards, with all rows that a forward has here. A collective if it is sharded."""
        cut = [] if self.vocabulary_shard is None else [Shard(0)]

        def gathered(part: DTensor) -> Tensor:  # tensor parallelism is the last dimension
            copies = [Replicate()] * (part.device_mesh.ndim - len(cut))
            return part.redistribute(placements=copies + cut).to_local()

        return self._head(gathered)

    @property
    def trains_head(self) -> bool:
        """Whether the output head's weight is trained."""
        return bool(self.lm.get_output_embeddings().weight.requires_grad)

    def _head(self, rows_of: Callable[[DTensor], Tensor] = DTensor.to_local) -> Head:
        layer = self.lm.get_output_embeddings()
        weight, bias = (
            rows_of(part) if isinstance(part, DTensor) else part
            for part in (layer.weight, getattr(layer, "bias", None))
        )
        return Head(weight, bias, *self._logits_form, self.vocabulary_shard)


def _logits_form(config: PretrainedConfig) -> tuple[float, float | None]:
    """(factor, cap) of the logits of such a model; `_check_head` proves that they are all."""
    values = config.get_text_config().to_dict()

    def first(names: Sequence[str]) -> float | None:
        found = (values.get(name) for name in names)
        return next((float(value) for value in found if isinstance(value, int | float) and value), None)

    divisor = first(DIVISORS) or 1.0
    scale = divisor if values.get("model_type") in MULTIPLIES_BY_DIVISOR else 1 / divisor
    return (first(FACTORS) or 1.0) * scale, first(CAPS)


AnyModel = TypeVar("AnyModel", bound=Backbone)
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

    Raises:
        SettingsError: they are not, or the model does not have these parts.
    """
    lm = model.lm
    if lead(lambda: _prove(model, packed, pieces, parted)):
        lm.set_attn_implementation(attention.NAME)
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


def _prove(model: Backbone, packed: bool, pieces: int, parted: bool) -> bool:
    """Whether its attention takes blocks. Raises `SettingsError` as `prepare_model`."""
    if model.weights is None:
        return _prove_on(model, packed, pieces, parted)
    return on_copy(model, lambda copy: _prove_on(copy, packed, pieces, parted, random=True))


def on_copy(model: AnyModel, find: Callable[[AnyModel], Found], layers: int = 1) -> Found:
    """What is found of a small random copy of a model that has no weights yet (see `probe`); of a larger one where
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
def _prove_on(model: Backbone, packed: bool, pieces: int, parted: bool, *, random: bool = False) -> bool:
    lm = model.lm.eval()
    refused = _use_blocks(model)
    if refused:
        log.info("prompts are computed for each sample: %s: %.300s", type(lm).__name__, refused)
    if parted:
        _check_parts(model, refused)
    if pieces > 1:
        _check_pieces(model, pieces, refused)
    elif packed and refused:
        _check_packing(model)
    if isinstance(model, PolicyModel):
        if random:  # at last, since with a tied head embeddings become larger too
            ids, positions = _probe(model, 8)
            logits = lm(ids, position_ids=positions, use_cache=False).logits
            probe.enlarge_logits(lm.get_output_embeddings(), logits)
        _check_head(model)
    return model.takes_blocks


@torch.no_grad()
def _check_head(model: PolicyModel) -> None:
    """What an architecture does to its logits beyond `Head`, this trainer would not do."""
    ids, positions = _probe(model, 8)
    expected = model.lm(input_ids=ids, position_ids=positions, use_cache=False).logits
    found = model._head().logits(model._hidden(ids, positions)[0])
    _compare(model, found, expected[0], "logits of this architecture are not those of a linear output head")


@torch.no_grad()
def _use_blocks(model: Backbone) -> str:
    """Let the model's attention take blocks, if it then computes the same; else why it does not."""
    lm, usual = model.lm, model.lm.config._attn_implementation
    ids, positions = _probe(model, 8)
    try:
        if usual not in (attention.NAME, attention.USUAL):
            raise ValueError(f"its attention is {usual}")
        blocks = [attention.block_of(0, 5, [3, 3], "cpu"), attention.block_of(11, 0, [8], "cpu")]
        parts = (slice(0, 8), slice(5, 8), slice(0, 8))
        row, places = (torch.cat([whole[:, part] for part in parts], 1) for whole in (ids, positions))
        with _narrow(lm, 3):
            expected = model._hidden(ids, positions)
            lm.set_attn_implementation(attention.NAME)
            found = model._hidden(row, places, blocks)
            for again in (found[:, :8], torch.cat([found[:, :5], found[:, 8:11]], 1), found[:, 11:]):
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
    found = [
        (holder, name, width)
        for holder in holders
        for name in ("sliding_window", "attention_chunk_size")
        if type(width := getattr(holder, name, None)) is int
    ]
    widest = {name: max(width for _, other, width in found if other == name) for _, name, _ in found}
    try:
        for holder, name, width in found:
            setattr(holder, name, window + width - widest[name])
        yield
    finally:
        for holder, name, width in found:
            setattr(holder, name, width)


@torch.no_grad()
def _check_pieces(model: Backbone, pieces: int, refused: str) -> None:
    """Each rank has a piece of the rows: outside of the attention, a position may not depend on others."""
    key, name = "policy.parallelism.cp_size", type(model.lm).__name__
    if refused:
        raise SettingsError(
            f"{key} = {pieces}: sequences of {name} cannot be cut: {refused:.300}; write {key} = 1"
        )
    ids, positions = _probe(model, 8)
    expected = model._hidden(ids, positions)
    model.context = probe = attention.Scattered(torch.tensor([5, 1, 9, 7, 3, 11, 8, 2]), 12)
    try:
        found = model._hidden(ids, positions).index_select(1, probe.places)
    finally:
        model.context = None
    _compare(model, found, expected, f"positions see others outside of its attention; write {key} = 1")
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
    (ids, positions), places = _probe(model, 8), torch.tensor([5, 1, 9, 7, 3, 11, 8, 2])
    expected = model._hidden(ids, positions)
    if not refused:
        try:
            with sequence.scattered(model.lm, places, 12):
                found = model._hidden(ids, positions).index_select(1, places)
        except (TypeError, AttributeError, RuntimeError, LookupError, ValueError) as error:
            refused = " ".join(str(error).split())
    if refused:
        raise SettingsError(
            f"{sequence.KEY} = true: sequences of {name} cannot be split between its layers: {refused:.300}; {remedy}"
        )
    _compare(model, found, expected, f"positions see others between its layers; {remedy}")


@torch.no_grad()
def _check_packing(model: Backbone) -> None:
    """State-space and convolution layers carry state across sequences in a row, positions or not."""
    ids, positions = _probe(model, 8)
    packed = model._hidden(ids.repeat(1, 2), positions.repeat(1, 2))[:, 8:]
    _compare(
        model, packed, model._hidden(ids, positions), "sequences in one row see each other; write "
        "train.sequence_packing = false",
    )  # fmt: skip


def _probe(model: Backbone, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(1, length + 1)[None] * 7919 % model.vocabulary
    return ids, torch.arange(length)[None]


def _compare(model: Backbone, found: Tensor, expected: Tensor, fault: str) -> None:
    if found.shape != expected.shape:
        shapes = f"{tuple(found.shape)} for {tuple(expected.shape)}"
        raise SettingsError(f"{type(model.lm).__name__} cannot be trained here: {fault} ({shapes})")
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1.0)
    if not error <= PROBE_TOLERANCE[expected.dtype]:
        raise SettingsError(
            f"{type(model.lm).__name__} cannot be trained here: {fault} (off by {float(error):.3g})"
        )
