"""The model that is trained: a transformers causal LM, asked for log-probs of given tokens instead of logits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from policy_worker.errors import SettingsError
from policy_worker.model import attention
from policy_worker.model.attention import Block
from policy_worker.model.logprobs import Beside, TokenOutputs, token_kl, token_logprobs
from policy_worker.model.micro_batch import MicroBatch
from schema.config import Config
from schema.config.modules import CANNOT_LOAD, ExternalModuleError, import_external, remedy

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of two ways to the same logits: far above rounding, far below a softcap or a leak."""


class PolicyModel(nn.Module):
    """`forward` is the one way in: sharding strategies hook on to it."""

    def __init__(self, lm: PreTrainedModel, dropout: dict[str, float] | None = None) -> None:
        """dropout: what the model's configuration said before it was switched off, for the export."""
        super().__init__()
        self.lm = lm
        self.dropout = dropout or {}

    def forward(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        beside: Beside | None = None,
        with_hidden: bool = False,
    ) -> TokenOutputs:
        """Log-prob, entropy and correctness of the batch's K labels under softmax(logits / temperature), or what
        `MicroBatch.drawn` makes of it."""
        hidden = self._hidden(batch.input_ids, batch.position_ids, batch.blocks)
        picked = hidden.flatten(0, 1).index_select(0, batch.index)
        found = token_logprobs(picked, self._head(), batch.labels, temperature, drawn=batch.drawn)
        if beside is not None:
            found = found._replace(kl=token_kl(picked, self._head(), beside, temperature, drawn=batch.drawn))
        return found._replace(hidden=picked) if with_hidden else found

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, blocks: Sequence[Block] = ()) -> Tensor:
        """[R, L, D]. No mask and no cache: sequences in a row are kept apart by blocks, or by their positions."""
        more = {"blocks": blocks} if blocks and self.takes_blocks else {}
        outputs = self.lm.base_model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=None, use_cache=False, **more
        )
        return cast(Tensor, outputs.last_hidden_state)

    @property
    def takes_blocks(self) -> bool:
        """Whether its attention takes blocks (see `attention`)."""
        return bool(self.lm.config._attn_implementation == attention.NAME)

    def whole_head(self) -> Tensor:
        """The output matrix on this rank, wherever its parts are. A collective if it is sharded."""
        weight = self._head()
        return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()

    def _head(self) -> Tensor:
        return cast(Tensor, self.lm.get_output_embeddings().weight)

    @property
    def vocabulary(self) -> int:
        """Number of token ids that have an embedding. Asked before the model is sharded."""
        return int(self.lm.get_input_embeddings().weight.shape[0])

    def decoder_layers(self) -> list[nn.Module]:
        """The repeated blocks, in order: what is sharded and recomputed as a unit.

        Raises:
            SettingsError: the model does not say which they are.
        """
        names = set(self.lm._no_split_modules or ())
        layers = [module for module in self.lm.modules() if type(module).__name__ in names]
        if not layers:
            raise SettingsError(
                f"{type(self.lm).__name__} does not name its decoder layers: it cannot be sharded"
            )
        return layers


def load_reference(config: Config, policy: PolicyModel) -> PolicyModel:
    """The frozen model of `[reference]` on the CPU, in `train.param_dtype`.

    Raises:
        SettingsError: as `load_model`, or its vocabulary is not that of the policy.
    """
    model = load_model(config, reference=True)
    if model.vocabulary != policy.vocabulary:
        raise SettingsError(
            f"reference.model_name_or_path = {config.reference.model_name_or_path!r} has {model.vocabulary} tokens, "
            f"and policy.model_name_or_path = {config.policy.model_name_or_path!r} has {policy.vocabulary}: a KL "
            f"compares probabilities of the same tokens; choose a model of the same tokenizer"
        )
    return model


def load_model(config: Config, weights: str | None = None, *, reference: bool = False) -> PolicyModel:
    """The model of `[policy]` on the CPU, in `train.master_dtype`, ready to train.

    weights: an export of it, whose weights are taken instead. reference: see `load_reference`.

    Raises:
        SettingsError: it cannot be loaded, or is of an architecture that this trainer would get wrong.
    """
    name, revision = config.policy.model_name_or_path, config.policy.model_revision
    what = f"policy.model_name_or_path = {name!r}"
    if reference and config.reference.model_name_or_path not in (None, name):
        name, revision = str(config.reference.model_name_or_path), None
        what = f"reference.model_name_or_path = {name!r}"
    if weights is not None:
        what = f"the export {weights} as a model of {what}"
    trust = config.policy.trust_remote_code
    dtype = DTYPES[config.train.param_dtype if reference else config.train.master_dtype]
    _import_modules(config)
    try:
        model_config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)
        dropout = _disable_dropout(model_config)
        lm, loaded = AutoModelForCausalLM.from_pretrained(
            name if weights is None else weights,
            revision=revision if weights is None else None,
            trust_remote_code=trust,
            config=model_config,
            dtype=dtype,
            output_loading_info=True,
        )
    except (*CANNOT_LOAD, RuntimeError, SafetensorError) as error:
        raise SettingsError(f"{what} cannot be loaded: {error}{remedy(error)}") from error
    missing = sorted(loaded["missing_keys"])
    if missing:  # transformers would fill them with random numbers
        raise SettingsError(f"{what} lacks weights: {', '.join(missing[:5])}, …")
    surplus = sorted(loaded["unexpected_keys"])
    if weights is not None and surplus:
        raise SettingsError(f"{what} has weights that this model does not: {', '.join(surplus[:5])}, …")
    recompute = config.policy.model_gradient_checkpointing and not reference
    return prepare_model(PolicyModel(lm, dropout), packed=config.train.sequence_packing, recompute=recompute)


def _import_modules(config: Config) -> None:
    try:
        import_external(config.policy.external_modules)
    except ExternalModuleError as error:
        raise SettingsError(str(error)) from error
    if config.policy.trust_remote_code:
        log.warning(
            "policy.trust_remote_code = true: code of %s may run here", config.policy.model_name_or_path
        )


def prepare_model(model: PolicyModel, *, packed: bool, recompute: bool) -> PolicyModel:
    """Prove that the shortcuts of this trainer are right for this architecture, and switch it to training.

    Raises:
        SettingsError: they are not.
    """
    lm = model.lm.eval()
    _check_head(model)
    _use_blocks(model)
    if packed and not model.takes_blocks:
        _check_packing(model)
    if recompute:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    lm.train()
    return model


def _disable_dropout(model_config: PretrainedConfig) -> dict[str, float]:
    """Policy gradients compare log-probs of one and the same policy, and dropout is a different one at each call."""
    found = {
        key: value
        for key, value in model_config.to_dict().items()
        if ("dropout" in key or key.endswith("_pdrop")) and isinstance(value, float) and value > 0
    }
    for key in found:
        setattr(model_config, key, 0.0)
    if found:
        log.info("dropout of the model is switched off for training: %s", found)
    return found


@torch.no_grad()
def _check_head(model: PolicyModel) -> None:
    """Some architectures cap, scale or shift their logits: then hidden · Wᵀ is not what they sample from."""
    ids, positions = _probe(model, 8)
    expected = model.lm(input_ids=ids, position_ids=positions, use_cache=False).logits
    found = model._hidden(ids, positions) @ model._head().T
    _compare(model, found, expected, "logits of this architecture are not hidden states times output matrix")


@torch.no_grad()
def _use_blocks(model: PolicyModel) -> None:
    """Let the model's attention take blocks, if it then computes the same."""
    lm, usual = model.lm, model.lm.config._attn_implementation
    ids, positions = _probe(model, 8)
    expected = model._hidden(ids, positions)
    try:
        if usual not in (attention.NAME, attention.USUAL):
            raise ValueError(f"its attention is {usual}")
        lm.set_attn_implementation(attention.NAME)
        blocks = [attention.block_of(0, 5, [3, 3], "cpu"), attention.block_of(11, 0, [8], "cpu")]
        parts = (slice(0, 8), slice(5, 8), slice(0, 8))
        row, places = (torch.cat([whole[:, part] for part in parts], 1) for whole in (ids, positions))
        found = model._hidden(row, places, blocks)
        for again in (found[:, :8], torch.cat([found[:, :5], found[:, 8:11]], 1), found[:, 11:]):
            _compare(model, again, expected, "sequences in one row see each other")
    except (SettingsError, ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
        lm.set_attn_implementation(usual)
        reason = " ".join(str(error).split())
        log.info("prompts are computed for each sample: %s: %.300s", type(lm).__name__, reason)


@torch.no_grad()
def _check_packing(model: PolicyModel) -> None:
    """State-space and convolution layers carry state across sequences in a row, positions or not."""
    ids, positions = _probe(model, 8)
    packed = model._hidden(ids.repeat(1, 2), positions.repeat(1, 2))[:, 8:]
    _compare(
        model, packed, model._hidden(ids, positions), "sequences in one row see each other; write "
        "train.sequence_packing = false",
    )  # fmt: skip


def _probe(model: PolicyModel, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(1, length + 1)[None] * 7919 % model.vocabulary
    return ids, torch.arange(length)[None]


def _compare(model: PolicyModel, found: Tensor, expected: Tensor, fault: str) -> None:
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1.0)
    if not error <= PROBE_TOLERANCE[expected.dtype]:
        raise SettingsError(
            f"{type(model.lm).__name__} cannot be trained here: {fault} (off by {float(error):.3g})"
        )
