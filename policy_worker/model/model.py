"""The models that are trained: a transformers causal LM, asked for log-probs of given tokens instead of logits; and a
critic, its like with one number for each position in the place of logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PretrainedConfig, PreTrainedModel

from policy_worker.errors import SettingsError
from policy_worker.model import attention, sequence
from policy_worker.model.attention import AttentionContext, Blocks, Outputs
from policy_worker.model.logits.head import Head, VocabularyShard
from policy_worker.model.logits.logprobs import Beside, TokenOutputs, token_logprobs
from policy_worker.model.logits.softmax import Fused
from policy_worker.model.micro_batch import MicroBatch, RoutingRecord
from policy_worker.model.pretrained import StoredWeights
from policy_worker.model.routing import RoutingReplay
from policy_worker.model.stages import StageInput, Stages

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


FACTORS = ("logit_scale", "lm_head_multiplier")
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names in configurations of the number by which logits are multiplied, divided, or at which they are capped."""
More = Callable[[Tensor, Head], Any]
"""Computes something else of hidden states [K, D] and the output head, of each token: see `PolicyModel.forward`."""
MULTIPLIES_BY_DIVISOR = frozenset({"hyperclovax"})
"""Kinds of models that multiply by `logits_scaling`."""


class Backbone(nn.Module):
    """A transformers model up to its last hidden states; `forward` of its kinds is the one way in, since sharding
    strategies hook on to it."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.weights: StoredWeights | None = None
        """Where they are to be read; None: it has them."""
        self.context: AttentionContext | None = None
        """The piece of the rows that this process has; None: they are whole."""
        self.stages: Stages | None = None
        """The stages of a pipeline that are left of the model; None: it is whole."""
        self.gather: sequence.Exchange | None = None
        """Makes all positions of this process' part of the last hidden states (see `sequence`); None: it has them."""
        self.routing_replay: RoutingReplay | None = None
        """The replay of what the engine's routers chose; None: those of the model choose."""
        self.reduces_late = False
        """Whether gradients are reduced after backward, and not within it (see `fsdp`)."""
        self.reduces_each = False
        """Whether they are reduced for each micro-batch, and not once for the last one."""

    def read_weights(self, device: torch.device) -> Self:
        """Read this rank's part of the weights to a device; a model that has them stays where it is."""
        if self.weights is not None:
            self.weights.fill(self.lm, device)
            self.weights = None
        return self

    def _hidden(
        self, input_ids: Tensor, position_ids: Tensor, blocks: Blocks | None = None, entry: StageInput | None = None
    ) -> Tensor:
        """[R, L, D], or of this process' piece of the rows [R, L / n, D].

        No mask and no cache: sequences in a row are kept apart by blocks, or by their positions.

        entry: the stage that runs, of a model that is cut into some; those before the last end before the norm, and
        have a part of the positions alone where these are split between layers."""
        arguments: dict[str, Any] = {"blocks": blocks} if blocks is not None and self.takes_blocks else {}
        if self.context is not None:
            input_ids, position_ids = self.context.cut(input_ids), self.context.cut(position_ids)
            arguments["context"] = self.context
        if entry is None or entry.received is None:
            arguments["input_ids"] = input_ids
        else:
            arguments["inputs_embeds"] = entry.received
        arguments |= {"position_ids": position_ids, "attention_mask": None, "use_cache": False}
        outputs = self.lm.base_model(**arguments)
        if entry is not None and not entry.is_last:
            return cast(Tensor, entry.passed)
        last = cast(Tensor, outputs.last_hidden_state)
        return last if self.gather is None else self.gather(last)

    def _of_batch(self, batch: MicroBatch, entry: StageInput | None) -> Tensor:
        """The states that predict the batch's labels, [K, D], of this process' piece [k, D]; those behind a stage
        before the last, see `_hidden`."""
        if entry is not None:
            assert self.stages is not None
            self.stages.layers.entry = entry
        self.recall(batch)
        blocks = Blocks(batch.blocks, batch.starts) if batch.blocks else None
        hidden = self._hidden(batch.input_ids, batch.position_ids, blocks, entry)
        return hidden.flatten(0, 1).index_select(0, batch.of_piece(batch.index)) if goes_to_head(entry) else hidden

    def recall(self, batch: MicroBatch, *, again: bool = False) -> None:
        """Let what is computed next be of this micro-batch. again: its backward, where others came between."""
        if self.routing_replay is None:
            return
        routing = batch.routing
        if routing is not None and self.context is not None:
            cut = self.context.cut
            routing = RoutingRecord(cut(routing.ids), None if routing.weights is None else cut(routing.weights))
        self.routing_replay.begin(routing, again=again)

    def _of_all(self, outputs: Outputs, batch: MicroBatch) -> Outputs:
        """Make outputs of the batch's K labels from those of the picked states."""
        return outputs if self.context is None else self.context.gather(outputs, batch.pieces)

    @property
    def takes_blocks(self) -> bool:
        """Whether its attention takes blocks (see `attention`)."""
        return bool(self.lm.config._attn_implementation == attention.NAME)

    @property
    def head_widths(self) -> list[int]:
        """Dimensions of the heads of queries, keys and values, as far as its configuration names them."""
        named = self.lm.config.get_text_config()
        names = ("qk_head_dim", "v_head_dim") if getattr(named, "v_head_dim", None) else ("head_dim",)
        return [width for width in (getattr(named, name, None) for name in names) if width]

    @property
    def vocabulary(self) -> int:
        """Number of token ids that have an embedding. Asked before the model is sharded."""
        return int(self.lm.get_input_embeddings().weight.shape[0])

    def decoder_layers(self) -> list[nn.Module]:
        """The repeated blocks, in order: what is sharded and recomputed as a unit.

        Raises `SettingsError`: the model does not say which they are."""
        layers = self._named_layers()
        if not layers:
            raise SettingsError(f"{type(self.lm).__name__} does not name its decoder layers: it cannot be sharded")
        return layers

    def _named_layers(self) -> list[nn.Module]:
        names = set(self.lm._no_split_modules or ())
        return [m for m in self.lm.modules() if type(m).__name__.removeprefix("FSDP") in names]

    def attentions(self) -> list[nn.Module]:
        """The attention of each layer that has one. Raises as `decoder_layers`."""
        attentions: list[nn.Module] = []
        for layer in self.decoder_layers():
            named = [m for m in layer.modules() if type(m).__name__.removeprefix("FSDP").endswith("Attention")]
            inner = {m for outer in named for m in outer.modules() if m is not outer}
            attentions += [m for m in named if m not in inner]
        return attentions

    def expert_blocks(self) -> list[nn.Module]:
        """Layers of experts, each with its router and shared experts."""
        names = [name for name, style in sequence.layers_of(self.lm).items() if style == sequence.EXPERTS]
        return [self.lm.get_submodule(name.rpartition(".")[0]) for name in names]

    def hidden_matrices(self) -> list[nn.Parameter]:
        """The matrices of the layers: what Muon is for. Raises as `decoder_layers`."""
        return [p for layer in self.decoder_layers() for p in layer.parameters() if p.ndim == 2]


def goes_to_head(entry: StageInput | None) -> bool:
    """Whether a forward ends with the head: that of a whole model, or of the last stage."""
    return entry is None or entry.is_last


class ValueModel(Backbone):
    """A critic: what it expects the tokens after a position to earn, one number for each. At first it expects 0."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(lm)
        embeddings = lm.get_input_embeddings().weight
        width = lm.config.get_text_config().hidden_size
        self.value_head = nn.Parameter(torch.zeros(width, dtype=embeddings.dtype))

    def forward(self, batch: MicroBatch, entry: StageInput | None = None) -> Tensor:
        """The value of what stands before each of the batch's K labels, [K], float32 (float64 for float64).

        entry: see `PolicyModel.forward`."""
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
        self.fused: Fused | None = None
        """Compiled functions that its log-probs are computed by; None: there are none."""
        self._logits_form = _logits_form(lm.config)

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        compared: Beside | None = None,
        with_hidden: bool = False,
        more: More | None = None,
        entry: StageInput | None = None,
    ) -> TokenOutputs | Tensor:
        """Log-prob, entropy and correctness of the batch's K labels under softmax(logits / temperature), or what
        `MicroBatch.drawn` makes of it.

        more: computes `TokenOutputs.more` of the hidden states and the output head, which are whole nowhere else;
            where rows are cut, of the tokens of this process' piece.
        entry: the stage that runs, of a model that is cut into some; one before the last gives its states."""
        picked = self._of_batch(batch, entry)
        if not goes_to_head(entry):
            return picked
        labels = batch.of_piece(batch.labels)
        outputs = token_logprobs(
            picked, self._head(), labels, temperature, drawn=batch.drawn, compared=compared, fused=self.fused
        )
        if more is not None:
            outputs = outputs._replace(more=more(picked, self._head()))
        return self._of_all(outputs._replace(hidden=picked) if with_hidden else outputs, batch)

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
        known = (values.get(name) for name in names)
        return next((float(value) for value in known if isinstance(value, int | float) and value), None)

    divisor = first(DIVISORS) or 1.0
    scale = divisor if values.get("model_type") in MULTIPLIES_BY_DIVISOR else 1 / divisor
    return (first(FACTORS) or 1.0) * scale, first(CAPS)


AnyModel = TypeVar("AnyModel", bound=Backbone)
