"""The model of the embedded engine: loaded, checked against a plain forward, and given new weights.

Which models fit: causal language models whose every layer is softmax attention over a growing cache (full or
sliding). The structure is asked of transformers; that the window computes what the model computes is proven at
every start by comparing log-probs, so a model that is attended to differently is refused, never decoded wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from rollout_worker.engines.base import (
    EngineConfigError,
    Generation,
    GenerationRequest,
    SamplingSettings,
    WeightMismatch,
)
from rollout_worker.engines.checksum import Tally
from rollout_worker.engines.scatter import PublishedTensor, WeightMap, WeightSlot, region_of, storage_of, whole
from rollout_worker.engines.transformers import attention
from rollout_worker.engines.transformers.decoder import Decoder
from rollout_worker.engines.transformers.routing import Chosen, Routing, RoutingError
from schema.config import overrides
from schema.config.modules import CANNOT_LOAD, remedy
from schema.config.sections.policy import LoraConfig
from schema.util.imports import without_collections
from weight_sync import HubNames, lora

_REMEDY = 'set rollout.backend = "vllm", or use another model'
TOLERANCE = 1e-3
"""Largest difference in log-prob between window and plain forward in float32; it is about 1e-5 when all is right."""
HALF_TOLERANCE = 0.25
"""Mean difference in half precision, where single tokens of a deep model may differ by as much for no reason. A wrong
mask or position is off by about 1 in the mean."""


def load_model(
    path: str,
    revision: str | None,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    override: Mapping[str, Any] = MappingProxyType({}),
    adapters: LoraConfig | None = None,
) -> Any:
    """The model on its device, in evaluation mode. Raises `EngineConfigError` when it cannot be loaded here.

    override: entries of its configuration that are replaced. adapters: put next to it; they are what is published.
    """
    with without_collections():
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    attention.register()
    arguments: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention.NAME}
    trust = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, **trust)
        overrides.apply(config, "policy.override_config", override)
        if load_format == "dummy":
            model = AutoModelForCausalLM.from_config(config, **arguments, **trust)
        else:
            # Its generation_config.json, which transformers may refuse, is of no use here.
            arguments["generation_config"] = GenerationConfig()
            model = AutoModelForCausalLM.from_pretrained(path, revision=revision, config=config, **arguments, **trust)
    except overrides.OverrideError as error:
        raise EngineConfigError(str(error)) from error
    except (*CANNOT_LOAD, StrictDataclassError) as error:
        raise EngineConfigError(
            f"policy.model_name_or_path = {path!r} cannot be loaded: {error}{remedy(error)}"
        ) from error
    if adapters is not None:
        _inject(model, adapters)
    _check_structure(model)
    model = model.to(device).eval()
    model.requires_grad_(False)
    return model


def _inject(model: Any, adapters: LoraConfig) -> None:
    try:
        lora.inject(model, adapters.model_copy(update={"init_lora_weights": True}))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise EngineConfigError(f"policy.lora: {type(model).__name__} cannot have these adapters: {error}") from error


def _check_structure(model: Any) -> None:
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = DynamicCache(config=model.config).layers
    strange = {type(layer).__name__ for layer in layers} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    if strange or model.config.is_encoder_decoder:
        kinds = ", ".join(sorted(strange)) or "an encoder"
        raise EngineConfigError(
            f'rollout.backend = "transformers" cannot decode {type(model).__name__} ({kinds}): {_REMEDY}'
        )


@torch.inference_mode()
def self_test(model: Any, eos_token_ids: frozenset[int], routing: Routing | None = None) -> int:
    """Prove that decoding in the window gives the log-probs of a plain forward of the same model, and that the
    experts that are recorded are those that it chooses.

    Prompts of different lengths, some decoding, a recomputation, more decoding. Returns the bytes that one token
    takes in the cache. Raises `EngineConfigError`.
    """
    decoder = Decoder(model, None, eos_token_ids, max_model_len=32, fill_tokens=16, keep_cache=False, routing=routing)
    decoder.set_version(0)
    try:
        differences, recorded, plain = _compared(model, decoder)
    except RoutingError as error:
        assert routing is not None
        raise routing.refusal(str(error)) from error
    except (NotImplementedError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise EngineConfigError(
            f'rollout.backend = "transformers" cannot decode {type(model).__name__}: {error}; {_REMEDY}'
        ) from error
    finally:
        model.set_attn_implementation(attention.NAME)
    full = model.dtype == torch.float32
    difference = float(differences.max() if full else differences.mean())
    if not difference <= (TOLERANCE if full else HALF_TOLERANCE):
        raise EngineConfigError(
            f'rollout.backend = "transformers" computes {type(model).__name__} wrongly (log-probs differ by '
            f"{difference:.3g} from a plain forward): {_REMEDY}"
        )
    if routing is not None:
        routing.check(recorded, plain, exactly=full)
    buffers = [(buffer.keys, buffer.values) for buffer in (*decoder.window.layers, *decoder.window.choices)]
    return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for pair in buffers for buffer in pair)


def _compared(model: Any, decoder: Decoder) -> tuple[torch.Tensor, list[Chosen], list[Chosen]]:
    """Absolute differences in log-prob of some samples' tokens, on the CPU; where they are recorded, the experts that
    were chosen, and those that a plain forward chooses. Raises `RoutingError`."""
    routing = decoder.routing
    settings = SamplingSettings(max_tokens=8, ignore_eos=True, routing="none" if routing is None else "weights")
    vocabulary = decoder.vocabulary
    prompts = [[(7 * i + 3 * length) % vocabulary for i in range(length)] for length in (5, 1, 12)]
    for number, prompt in enumerate(prompts):
        request = GenerationRequest(str(number), prompt, (number, number + 7), settings)
        decoder.admit([(request, (0, 1))])
        for _ in range(2):
            decoder.step()
    decoder.recompute()
    finished: list[Generation] = []
    while decoder.rows:
        finished += decoder.step()
    model.set_attn_implementation("eager")  # knows soft caps and sinks, which the fused one leaves out
    differences, plain = [], list[Chosen]()
    for generation in finished:
        prompt = prompts[int(generation.request_id)]
        ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]], device=model.device)
        with nullcontext() if routing is None else routing.into(lambda *pair: plain.append(routing.recorded(*pair))):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :].float()
        expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        differences.append((expected - torch.from_numpy(generation.logprobs)).abs())
    recorded = [(generation.expert_ids, generation.expert_weights) for generation in finished]
    return torch.cat(differences), recorded, plain


def _parameters(model: Any) -> dict[str, tuple[str, torch.Tensor]]:
    """By published name: a parameter's name in the model, and the parameter."""
    stored = dict(model.state_dict(keep_vars=True))
    if lora.has_adapters(model):
        return {name: (own, stored[own]) for name, own in HubNames(model, lora="adapter").plain.items()}
    return {name: (name, tensor) for name, tensor in stored.items()}


def _held(model: Any) -> dict[str, torch.Tensor]:
    """Everything that is to be published, as the model has it."""
    return dict(HubNames(model, lora="adapter").tensors())


@torch.inference_mode()
def apply_weights(model: Any, given: Mapping[str, torch.Tensor]) -> None:
    """Copy a version into the model in place, cast to its dtype. Raises `WeightMismatch`."""
    targets = {name: tensor for name, (_, tensor) in _parameters(model).items()}
    tensors = dict(given)
    if not tensors.keys() <= targets.keys() and not lora.has_adapters(model):
        # The model is fused or renamed in memory: transformers converts checkpoint names as it does on loading.
        converted = type(model).from_pretrained(None, config=model.config, state_dict=tensors, dtype=model.dtype)
        tensors = dict(converted.state_dict())
    for name, tensor in tensors.items():
        target = targets.get(name)
        if target is None or target.shape != tensor.shape:
            mismatch = "no such tensor" if target is None else f"shape {tuple(target.shape)}"
            raise WeightMismatch(
                f"published tensor {name!r} of shape {tuple(tensor.shape)}: the engine's model has {mismatch}"
            )
        target.copy_(tensor)


@torch.inference_mode()
def verify_weights(model: Any, given: Mapping[str, torch.Tensor]) -> None:
    """Prove that every weight in use equals the version's, cast to the model's dtype. Raises `WeightMismatch`."""
    held = _held(model)
    missing = sorted(held.keys() - given.keys())
    # A trainer may name the other alias of a tied tensor; it is then in the model under both names.
    aliases = {name: tensor for name, (_, tensor) in _parameters(model).items()}
    extra = sorted(name for name in given.keys() - held.keys() if name not in aliases)
    missing = [name for name in missing if not any(_same(aliases, name, other) for other in given)]
    if missing or extra:
        raise WeightMismatch(
            f"published weights are not those of the engine's model: missing {missing[:5]}, unknown {extra[:5]}"
        )
    different = [
        name
        for name, tensor in given.items()
        if not torch.equal(held.get(name, aliases.get(name)), tensor.to(model.device, model.dtype))
    ]
    if different:
        raise WeightMismatch(f"{len(different)} tensors differ after loading (or hold NaN): {different[:5]}")


def weight_map(model: Any, given: Mapping[str, torch.Tensor]) -> WeightMap | None:
    """Where the elements of published tensors lie, after they have been applied; None where the model is fused or
    renamed in memory."""
    targets = _parameters(model)
    if not given.keys() <= targets.keys():
        return None
    places = {}
    for name, tensor in given.items():
        if tensor.numel():
            own, target = targets[name]
            places[name] = [WeightSlot(own, storage_of(target), whole(tensor.shape), region_of(target))]
    return WeightMap(
        {name: PublishedTensor(tensor.dtype, tuple(tensor.shape)) for name, tensor in given.items()}, places
    )


@torch.inference_mode()
def served(model: Any, published: Mapping[str, PublishedTensor], copy: Mapping[str, torch.Tensor] | None) -> Tally:
    """Hash the published tensors as the model holds them; `copy`: those of the host's copy, where needed."""
    held = {name: tensor for name, (_, tensor) in _parameters(model).items()} | _held(model)
    tally = Tally(copy)
    for name, spec in published.items():
        tally.add(name, spec, held[name].detach().cpu())
    return tally


def _same(tensors: dict[str, torch.Tensor], name: str, other: str) -> bool:
    return name in tensors and other in tensors and tensors[name] is tensors[other]
