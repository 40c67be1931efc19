"""The models of a configuration, each from its source.

    load_model, load_reference, …     on the meta device, proved, and frozen as configured
    [ the trainer shards it ]
    read_weights                      each rank reads its part

Each rank reads all weights of a source that cannot be read in parts, and of a model whose adapters begin with parts
of the base.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from policy_worker.errors import SettingsError
from policy_worker.model import flash, lora
from policy_worker.model.model import DTYPES, AnyModel, PolicyModel, ValueModel
from policy_worker.model.prepare import Lead, alone, prepare_model, replay_routing
from policy_worker.model.pretrained import StoredWeights, skeleton, weight_files
from policy_worker.model.trainable import freeze
from schema.config import Config, overrides
from schema.config.layout import mesh_of
from schema.config.modules import CANNOT_LOAD, ExternalModuleError, import_external, remedy
from schema.config.rules.teacher import tokens_are_those_of_the_policy
from schema.config.sections.model_keys import CheckpointingKeys, ModelKeys
from schema.config.sections.optimizer import PrecisionKeys
from schema.config.sections.policy import LoraConfig, ParallelismConfig, PolicyConfig
from schema.config.sections.teacher import TeacherConfig
from weight_sync.errors import WeightError

log = logging.getLogger(__name__)


def load_model(
    config: Config, weights: str | None = None, *, restored: bool = False, lead: Lead = alone
) -> PolicyModel:
    """The model of `[policy]`, in `train.master_dtype`, ready to train; with adapters the rest of it in
    `train.param_dtype`.

    weights: an export of it, whose weights are taken instead. restored: those of a checkpoint will be taken, so that
    none are read. lead: proves for all ranks (see `prepare_model`).

    Raises `SettingsError`: it cannot be loaded, or is of an architecture that this trainer would get wrong."""
    flash.use_flash(config.train.fa_version)
    source = ModelSource.of_policy(config)
    if weights is not None:
        what = f"the export {weights} as a model of {source.what}"
        source = replace(source, what=what, weights=weights)
    _import_modules("policy", config.policy, config.policy.model_name_or_path)
    adapters, master = config.policy.lora, DTYPES[config.train.master_dtype]
    dtype = master if adapters is None else DTYPES[config.train.param_dtype]
    loaded = source.load(AutoModelForCausalLM, dtype, whole=_is_whole(adapters))
    _refuse_untied(loaded.lm, source.what)
    if adapters is not None:
        lora.inject(loaded.lm, adapters, "policy.lora")
    else:
        freeze(loaded.lm, config.policy.trainable_map, routers=config.policy.freeze_moe_router)
    if loaded.weights is not None:  # a checkpoint of adapters does not hold the rest of the model
        loaded.weights.restored = restored and adapters is None
    model = _policy_like(
        loaded, config, config.policy.parallelism, lead, **kept_activations(config.policy, config.train)
    )
    if adapters is not None:
        lora.widen(model, master)
    if config.replays_routing and config.grpo.routing_replay != "none":
        replay_routing(model, config.grpo.routing_replay, lead)
    return model


def load_reference(config: Config, policy: PolicyModel, *, lead: Lead = alone) -> PolicyModel:
    """The frozen model of `[reference]`, in `train.param_dtype`. lead: as for `load_model`.

    Raises `SettingsError`: as `load_model`, or its vocabulary is not that of the policy."""
    source = ModelSource.of_policy(config)
    if config.reference.model_name_or_path not in (None, source.name):
        name = str(config.reference.model_name_or_path)
        source = ModelSource(f"reference.model_name_or_path = {name!r}", name, None, source.trust)
    model = _load_frozen(config, source, mesh_of(config, "reference"), lead)
    if model.vocabulary != policy.vocabulary:
        raise SettingsError(
            f"reference.model_name_or_path = {config.reference.model_name_or_path!r} has {model.vocabulary} tokens, "
            f"and policy.model_name_or_path = {config.policy.model_name_or_path!r} has {policy.vocabulary}: a KL "
            f"compares probabilities of the same tokens; choose a model of the same tokenizer"
        )
    return model


def load_teacher(config: Config, teacher: TeacherConfig, policy: PolicyModel, *, lead: Lead = alone) -> PolicyModel:
    """The frozen model of a local `[[teacher]]`, in `train.param_dtype`. lead: as for `load_model`.

    Raises `SettingsError`: as `load_model`, or its tokens are not those of the policy."""
    name = str(teacher.model)
    what = f"teacher {teacher.name}: model = {name!r}"
    source = ModelSource(what, name, None, config.policy.trust_remote_code)
    model = _load_frozen(config, source, config.policy.parallelism, lead)
    for problem in tokens_are_those_of_the_policy(config):  # which could not be read before they were fetched
        raise SettingsError(problem.render())
    whole = teacher.loss in ("reverse_kl_full", "top_k_jsd")
    if model.vocabulary < policy.vocabulary or (whole and model.vocabulary != policy.vocabulary):
        raise SettingsError(
            f"teacher {teacher.name}: model = {teacher.model!r} has {model.vocabulary} tokens, and the policy "
            f'{policy.vocabulary}, and loss = "{teacher.loss}" compares probabilities of the same tokens; choose a '
            f"model of the same tokenizer, or of a larger one of its family with one of the losses on sampled tokens"
        )
    if teacher.loss == "top_k_jsd" and teacher.top_k > model.vocabulary:
        raise SettingsError(f"teacher {teacher.name}: top_k = {teacher.top_k} of {model.vocabulary} tokens")
    return model


def load_critic(config: Config, policy: PolicyModel, *, lead: Lead = alone) -> ValueModel:
    """The model of `[critic]`, in `critic.master_dtype`, ready to train; its value head begins at 0. With adapters
    the rest of it is in `critic.param_dtype`.

    lead: as for `load_model`.

    Raises `SettingsError`: as `load_model`, or it reads other tokens than the policy writes."""
    critic, source = config.critic, ModelSource.of_policy(config)
    override = {"critic.override_config": critic.override_config}
    if critic.model_name_or_path in (None, source.name):
        source = replace(
            source,
            revision=critic.model_revision or source.revision,
            trust=source.trust or critic.trust_remote_code,
            overrides={**source.overrides, **override},
        )
    else:
        name = str(critic.model_name_or_path)
        what = f"critic.model_name_or_path = {name!r}"
        source = ModelSource(what, name, critic.model_revision, critic.trust_remote_code, override)
    _import_modules("critic", critic, source.name)
    master = DTYPES[critic.master_dtype]
    dtype = master if critic.lora is None else DTYPES[critic.param_dtype]
    loaded = source.load(AutoModel, dtype, whole=_is_whole(critic.lora))
    _choose_experts(loaded.lm, config.policy)
    if critic.lora is not None:
        lora.inject(loaded.lm, critic.lora, "critic.lora")
    else:
        freeze(loaded.lm, None, routers=critic.freeze_moe_router, section="critic")
    model = ValueModel(loaded.lm)
    model.weights = loaded.weights
    if model.vocabulary != policy.vocabulary:
        raise SettingsError(
            f"{source.what} has {model.vocabulary} tokens, and policy.model_name_or_path = "
            f"{config.policy.model_name_or_path!r} has {policy.vocabulary}: a critic reads what the policy writes; "
            f"choose a model of the same tokenizer"
        )
    mesh = mesh_of(config, "critic")
    _prepare(model, config, mesh, lead, **kept_activations(critic, critic))
    if critic.lora is not None:
        lora.widen(model, master)
    return model


def _refuse_untied(lm: PreTrainedModel, what: str) -> None:
    """Weights that config.json ties and the files hold twice, with different values: engines take one of them, the
    trainer both. Raises `SettingsError`."""
    declared = lm.get_expanded_tied_weights_keys(all_submodels=True)
    for alias in declared.keys() - lm.all_tied_weights_keys.keys():
        raise SettingsError(
            f"{what}: its config.json ties {alias} to {declared[alias]} (tie_word_embeddings), and files hold both "
            f"with different values: to train both write policy.override_config = {{ tie_word_embeddings = false }}, "
            f"else take {alias} out of the files"
        )


def _is_whole(adapters: LoraConfig | None) -> bool:
    """Whether weights are needed before the model is sharded: some adapters begin with numbers of them."""
    return adapters is not None and adapters.begins_with_base


def _load_frozen(config: Config, source: ModelSource, mesh: ParallelismConfig, lead: Lead) -> PolicyModel:
    _import_modules("policy", config.policy, config.policy.model_name_or_path)
    dtype = DTYPES[config.train.param_dtype]
    loaded = source.load(AutoModelForCausalLM, dtype)
    return _policy_like(loaded, config, mesh, lead, recompute=False)


def kept_activations(model: CheckpointingKeys, keys: PrecisionKeys) -> dict[str, Any]:
    """Describe what `prepare_model` is to make of the activations of a model that trains."""
    parts = ["attention"] if keys.recompute_granularity == "selective" else []
    parts += ["experts"] if keys.recompute_moe_layers else []
    again, on_host = model.model_gradient_checkpointing, keys.activation_offload
    return {"recompute": again, "parts": parts, "on_host": on_host}


def _policy_like(
    loaded: LoadedModel, config: Config, mesh: ParallelismConfig, lead: Lead, **kept: Any
) -> PolicyModel:
    _choose_experts(loaded.lm, config.policy)
    model = PolicyModel(loaded.lm, loaded.dropout)
    model.weights = loaded.weights
    return _prepare(model, config, mesh, lead, **kept)


def _prepare(model: AnyModel, config: Config, mesh: ParallelismConfig, lead: Lead, **kept: Any) -> AnyModel:
    prepare_model(
        model,
        packed=config.train.sequence_packing,
        **kept,
        pieces=mesh.cp_size,
        parted=mesh.sequence_parallel,
        lead=lead,
    )
    if config.train.fa_version is not None and not model.takes_blocks:
        raise SettingsError(
            f"train.fa_version = {config.train.fa_version}: the attention of {type(model.lm).__name__} is not one "
            f"that FlashAttention computes here: leave it out"
        )
    if config.train.fa_version is not None and torch.cuda.is_available():
        config_of_text = model.lm.config.get_text_config()
        windows = [None, *([4] if getattr(config_of_text, "sliding_window", None) else [])]
        flash.try_kernel(config.train.fa_version, windows, torch.device("cuda"))
    return model


def _choose_experts(lm: PreTrainedModel, keys: PolicyConfig) -> None:
    if lm._can_set_experts_implementation():
        lm.set_experts_implementation("grouped_mm" if keys.moe_grouped_gemm else "eager")


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model, and the dropout that its configuration had. weights: see `Backbone.weights`."""

    lm: PreTrainedModel
    dropout: dict[str, float]
    weights: StoredWeights | None


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. what: its key and its value, for messages. trust: whether its own code may run.
    overrides: entries of its config.json that are replaced, by the key that has them. weights: where they are, and no
    others, if not where the configuration is."""

    what: str
    name: str
    revision: str | None
    trust: bool
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    weights: str | None = None

    @staticmethod
    def of_policy(config: Config) -> ModelSource:
        policy = config.policy
        return ModelSource(
            f"policy.model_name_or_path = {policy.model_name_or_path!r}",
            policy.model_name_or_path,
            policy.model_revision,
            policy.trust_remote_code,
            {"policy.override_config": policy.override_config},
        )

    def load(
        self, auto: type[AutoModel | AutoModelForCausalLM], dtype: torch.dtype, *, whole: bool = False
    ) -> LoadedModel:
        """The model on the meta device; with its weights, on the CPU, where they cannot be read in parts.

        whole: its weights are needed before it is sharded. Raises `SettingsError`: it cannot be loaded."""
        try:
            config = self._config()
            dropout = _disable_dropout(config)
            name, revision = (self.name, self.revision) if self.weights is None else (self.weights, None)
            files = weight_files(name, revision)
            quantized = getattr(config, "quantization_config", None) is not None
            weights = None
            if files and not quantized and not whole:
                lm = skeleton(auto, config, dtype, revision, self.trust)
                weights = StoredWeights(self.what, lm, files, dtype)
                missing, surplus = weights.missing, weights.surplus
            else:
                lm, report = auto.from_pretrained(
                    name,
                    revision=revision,
                    trust_remote_code=self.trust,
                    config=config,
                    dtype=dtype,
                    generation_config=GenerationConfig(),  # exports copy its file, which transformers may refuse
                    output_loading_info=True,
                )
                missing, surplus = (sorted(report[key]) for key in ("missing_keys", "unexpected_keys"))
                if not whole:
                    reason = "they are quantized" if quantized else "they are not in safetensors files alone"
                    log.warning("%s: each rank has read all weights, since %s", self.what, reason)
        except overrides.OverrideError as error:
            raise SettingsError(str(error)) from error
        except (*CANNOT_LOAD, RuntimeError, SafetensorError, StrictDataclassError, WeightError) as error:
            raise SettingsError(f"{self.what} cannot be loaded: {error}{remedy(error)}") from error
        if missing:  # transformers would fill them with random numbers
            raise SettingsError(f"{self.what} lacks weights: {', '.join(missing[:5])}, …")
        if surplus and self.weights is not None:
            raise SettingsError(f"{self.what} has weights that this model does not: {', '.join(surplus[:5])}, …")
        if surplus and auto is AutoModelForCausalLM:  # others lack the output head
            log.warning(
                "%s: its files hold tensors that %s has no place for, neither trained nor exported (%d): %s%s",
                self.what, type(lm).__name__, len(surplus), ", ".join(surplus[:5]), ", …" * (len(surplus) > 5),
            )  # fmt: skip
        return LoadedModel(lm, dropout, weights)

    def _config(self) -> PretrainedConfig:
        config = AutoConfig.from_pretrained(self.name, revision=self.revision, trust_remote_code=self.trust)
        for key, override in self.overrides.items():
            overrides.apply(config, key, override)
        return config


def _import_modules(section: str, keys: ModelKeys, name: str) -> None:
    try:
        import_external(keys.external_modules)
    except ExternalModuleError as error:
        raise SettingsError(str(error)) from error
    if keys.trust_remote_code:
        log.warning("%s.trust_remote_code = true: code of %s may run here", section, name)


def _disable_dropout(model_config: PretrainedConfig) -> dict[str, float]:
    """Policy gradients compare log-probs of one and the same policy, and dropout is a different one at each call."""
    dropouts = {
        key: value
        for key, value in model_config.to_dict().items()
        if overrides.is_dropout(key) and isinstance(value, float) and value > 0
    }
    for key in dropouts:
        setattr(model_config, key, 0.0)
    if dropouts:
        log.info("dropout of the model is switched off for training: %s", dropouts)
    return dropouts
