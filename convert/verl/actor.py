"""verl's `actor_rollout_ref.actor` and `.ref`: loss, batches, optimizer, mesh and checkpoints."""

from __future__ import annotations

from convert.engine import to, values
from convert.engine.model import Result, implicit, mapped, no_counterpart
from convert.engine.rules import ConversionContext, Converter, KeyPath, Rule, computed, rules_below
from convert.engine.values import BadValue, shown
from convert.verl.facts import (
    ACTOR,
    POLICY,
    REF,
    compiled,
    group_size,
    is_streamed,
    is_veomni,
    lacking,
    no_reference,
    prompts_per_step,
    response_length,
    router_replay,
    switched,
)
from convert.verl.mesh import Mesh
from convert.verl.optim import Optim
from convert.verl.shared import INFERENCE_BATCHES, INFERENCE_REASON, Budget, checkpoint_rules, profiler_rules
from convert.verl.unsupported import LOSS_OPTIONS, VERL

KL_TYPES = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "full": "full",
}
_OF_SEQUENCES = ("gspo", "geo_mean")
_AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum")
_NORMED = "seq-mean-token-sum-norm"
_LOSSES = {"vanilla": "grpo", "gspo": "gspo", "cispo": "cispo", "gpg": "reinforce", "geo_mean": "geo_mean"}
_STRATEGY = "how a model is sharded follows from policy.parallelism"
_CHUNKED = "entropy_from_logits_with_chunking entropy_from_logits_chunk_size"
_PADDING = "padding never changes a number here"


def actor_rules() -> tuple[Rule, ...]:
    """All rules of the actor."""
    return (
        *_batches(),
        *_loss(),
        *_small(),
        *checkpoint_rules(ACTOR),
        *Optim(ACTOR, "train", 1e-6).rules(),
        *Mesh(ACTOR, "policy", "train").rules(),
        *profiler_rules(ACTOR),
    )


def reference_rules() -> tuple[Rule, ...]:
    """All rules of the reference model."""
    budget = Budget(
        per_gpu=f"{REF}.log_prob_micro_batch_size_per_gpu",
        ours=("reference.mini_batch", "reference.max_token_len_per_mini_batch"),
        whole=f"{REF}.log_prob_micro_batch_size",
        switch=f"{REF}.log_prob_use_dynamic_bsz",
        tokens=f"{REF}.log_prob_max_token_len_per_gpu",
        when=no_reference,
    )
    same = to.always("the reference model is loaded and compiled like the policy")
    chunks, padding = to.always("log-probs are always computed in chunks"), to.always(_PADDING)
    copied = {
        "sync_actor": to.always("see sync_steps"),
        "sync_steps": to.given(
            lambda context: context.flag(f"{REF}.sync_actor"),
            "no effect while sync_actor = false",
            to.integer(f"{POLICY}.reference_reset_interval", "with sync_actor only"),
        ),
        "sync_actor_alpha": lacking(1.0, 1),
    }
    return (
        *budget.rules(),
        *Mesh(REF, "reference", "reference", when=no_reference).rules(),
        Rule(f"{REF}.model.path", _reference_path, when=no_reference),
        *rules_below(REF, {"strategy": to.always(_STRATEGY), "use_torch_compile load_weight": same}),
        Rule(f"{REF}.param_offload", to.flag("reference.offload"), when=no_reference),
        Rule(f"{REF}.rollout_n", to.always("repeats actor_rollout_ref.rollout.n")),
        *rules_below(REF, copied, no_reference),
        *rules_below(REF, {f"{_CHUNKED} entropy_checkpointing": chunks, "pad_to_length": padding}),
        *profiler_rules(REF),
        *rules_below(REF, {"router_replay.mode": lacking("disabled"), "router_replay.*": lacking()}),
    )


# --- batches ------------------------------------------------------------------------------------------------


@computed(f"{POLICY}.batch_size_per_optimize", words="prompts × rollout.n; unset where it is the whole batch")
def _ppo_mini_batch(context: ConversionContext, leaf: KeyPath) -> Result:
    prompts, n = values.integer(leaf.value), group_size(context)
    batch = prompts_per_step(context)
    key, samples = f"{POLICY}.batch_size_per_optimize", ("train.train_batch_per_replica", batch * n)
    step = [samples] if is_streamed(context) else []
    if prompts >= batch:
        return mapped((key, None), *step, note=f"one optimizer step for the whole batch of {batch} prompts")
    if prompts <= 0:
        raise BadValue(f"expected at least 1, got {prompts}")
    return mapped((key, prompts * n), *step, note=f"{prompts} prompts × {n} samples")


def _batches() -> tuple[Rule, ...]:
    budget = Budget(
        per_gpu=f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        ours=(f"{POLICY}.mini_batch", f"{POLICY}.max_token_len_per_mini_batch"),
        pipeline="policy.parallelism.pp_micro_batch_size",
        whole=f"{ACTOR}.ppo_micro_batch_size",
        switch=f"{ACTOR}.use_dynamic_bsz",
        tokens=f"{ACTOR}.ppo_max_token_len_per_gpu",
        default_tokens=16384,
    )
    return (
        Rule(f"{ACTOR}.ppo_mini_batch_size", _ppo_mini_batch, default=256),
        *budget.rules(),
        Rule(f"{ACTOR}.ppo_epochs", to.integer(f"{POLICY}.mu_iterations"), default=1),
        Rule(f"{ACTOR}.shuffle", to.flag(f"{POLICY}.mini_batch_shuffle"), default=False),
        Rule(
            f"{ACTOR}.data_loader_seed",
            to.given(
                lambda context: context.flag(f"{ACTOR}.shuffle"),
                "no effect while actor.shuffle = false",
                to.integer(f"{POLICY}.mini_batch_shuffle_seed", "with actor.shuffle only"),
            ),
        ),
    )


# --- the loss -----------------------------------------------------------------------------------------------


def _loss() -> tuple[Rule, ...]:
    table = {
        "clip_ratio": _clip_side("for each side without a key of its own", "low", "high"),
        "clip_ratio_low": _clip_side("as it is; from 1 on the side is open: −1", "low"),
        "clip_ratio_high": _clip_side("as it is", "high"),
        "clip_ratio_c": _dual_clip,
        "loss_agg_mode": _aggregation,
        "loss_scale_factor": to.given(
            lambda context: (
                context.text(f"{ACTOR}.loss_agg_mode") == _NORMED
                and context.text(f"{ACTOR}.policy_loss.loss_mode") not in _OF_SEQUENCES
            ),
            f"no effect without loss_agg_mode = {_NORMED}, or with a loss of sequences",
            to.integer(f"{POLICY}.unbiased_loss_max_tokens", "with `seq-mean-token-sum-norm` only"),
        ),
        "entropy_coeff": to.number(f"{POLICY}.entropy_coeff"),
        "use_kl_loss": _use_kl_loss,
        "kl_loss_coef": to.given(
            lambda context: context.flag(f"{ACTOR}.use_kl_loss"),
            "no effect while use_kl_loss = false",
            to.number(f"{POLICY}.kl_beta", "with use_kl_loss only"),
        ),
        "kl_loss_type": _kl_type,
        "policy_loss.loss_mode": _loss_mode,
        " ".join(LOSS_OPTIONS): _loss_option,
        "tis_imp_ratio_cap": _tis_cap,
    }
    defaults = {
        "clip_ratio": 0.2,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "entropy_coeff": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
        "policy_loss.loss_mode": "vanilla",
    }
    return rules_below(ACTOR, table, defaults=defaults)


def _clip_side(words: str, *sides: str) -> Converter:
    """The clip of these sides, of `low` and `high`; clip_ratio is that of a side without a key of its own."""

    @computed(*(f"{POLICY}.epsilon_{side}" for side in sides), words=words, null="null: clip_ratio counts")
    def convert(context: ConversionContext, leaf: KeyPath) -> Result:
        loss = context.text(f"{ACTOR}.policy_loss.loss_mode")
        if loss == "gpg":
            return implicit("gpg has no ratio to clip")
        own = [side for side in sides if context.number(f"{ACTOR}.clip_ratio_{side}", None) is None]
        keys = {side: f"{POLICY}.epsilon_{side}" for side in (own if len(sides) > 1 else sides)}
        if not keys:
            return implicit("clip_ratio_low and clip_ratio_high are both set")
        clip = to.clip_sides(leaf.value, keys.get("low", ""), keys.get("high", ""))
        if clip.note and loss == "geo_mean":
            raise BadValue(
                f"geo_mean bounds the ratio's logarithm, which {shown(leaf.value)} does not leave open"
            )
        return clip

    return convert


@computed(f"{POLICY}.lower_bound_ratio", words="as it is; gspo, geo_mean, cispo and gpg have no dual clip")
def _dual_clip(context: ConversionContext, leaf: KeyPath) -> Result:
    if (loss := context.text(f"{ACTOR}.policy_loss.loss_mode")) in (*_OF_SEQUENCES, "cispo", "gpg"):
        return implicit(f"{loss} has no dual clip")
    return mapped((f"{POLICY}.lower_bound_ratio", values.number(leaf.value)))


@computed(
    f"{POLICY}.loss_type",
    f"{POLICY}.unbiased_loss_max_tokens",
    words="`seq-mean-token-sum-norm` → `seq-mean-token-mean` with unbiased_loss_max_tokens",
)
def _aggregation(context: ConversionContext, leaf: KeyPath) -> Result:
    key, mode = f"{POLICY}.loss_type", values.text(leaf.value)
    loss = context.text(f"{ACTOR}.policy_loss.loss_mode")
    if loss in _OF_SEQUENCES and mode in (*_AGGREGATIONS, _NORMED):
        terms = _averaged_terms(context)
        if terms and mode != "seq-mean-token-mean":
            context.warn(
                f"{leaf.key} = {mode} with policy_loss.loss_mode = {loss}: verl averages the policy loss over "
                f"sequences, and what {terms} asks for by {mode}; here both are averaged over sequences"
            )
        return mapped((key, "seq-mean-token-mean"), note=f"{loss} averages over each sequence")
    if mode in _AGGREGATIONS:
        return mapped((key, mode))
    if mode == _NORMED:
        longest = context.integer(f"{ACTOR}.loss_scale_factor", None) or response_length(context)
        note = f"Dr. GRPO: the sum over all tokens divided by {longest} tokens and the number of sequences"
        context.warn(
            f"{ACTOR}.loss_agg_mode = seq-mean-token-sum-norm: the sum is divided by {longest} tokens and the number "
            "of sequences of the optimizer step, as verl does where its agg_loss takes global_batch_size. Older "
            "versions divide the sum of a micro-batch by the tokens alone: their gradient is larger by the number "
            "of sequences of a micro-batch, which counts where gradients are clipped "
            "(train.optm_grad_norm_clip) and where the optimizer is not of Adam's kind"
        )
        return mapped(
            (key, "seq-mean-token-mean"), (f"{POLICY}.unbiased_loss_max_tokens", longest), note=note
        )
    raise BadValue(f"expected {', '.join(_AGGREGATIONS)} or {_NORMED}, got {shown(mode)}")


def _averaged_terms(context: ConversionContext) -> str:
    """The terms of the loss besides the policy's that loss_agg_mode averages; "" where the file has none."""
    has = {
        "entropy_coeff": bool(context.number(f"{ACTOR}.entropy_coeff", 0.0)),
        "use_kl_loss": context.flag(f"{ACTOR}.use_kl_loss"),
    }
    return " and ".join(name for name, asked in has.items() if asked)


@computed(f"{POLICY}.kl_beta", words="false: kl_beta stays 0")
def _use_kl_loss(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or not values.flag(leaf.value):
        return implicit("false: no KL in the loss, kl_beta stays 0")
    coefficient = context.number(f"{ACTOR}.kl_loss_coef", 0.001) or 0.0
    return mapped((f"{POLICY}.kl_beta", coefficient), note="kl_loss_coef")


@computed(f"{POLICY}.kl_type", words="`kl` → `k1`, `mse` → `k2`, `low_var_kl` → `k3`; with use_kl_loss only")
def _kl_type(context: ConversionContext, leaf: KeyPath) -> Result:
    name = values.text(leaf.value)
    if not context.flag(f"{ACTOR}.use_kl_loss"):
        return implicit("no effect while use_kl_loss = false")
    if name not in KL_TYPES:
        raise BadValue(f"expected one of {', '.join(KL_TYPES)}, got {shown(name)}")
    return mapped((f"{POLICY}.kl_type", KL_TYPES[name]))


@computed(f"{POLICY}.variant", words="`vanilla` → `grpo`; `gpg` → `reinforce`")
def _loss_mode(context: ConversionContext, leaf: KeyPath) -> Result:
    mode = values.text(leaf.value)
    if mode in _LOSSES:
        return mapped((f"{POLICY}.variant", _LOSSES[mode]))
    reason = VERL.reason(f"{leaf.key}={mode}")
    if reason is not None:
        return no_counterpart(reason)
    raise BadValue(f"expected one of {', '.join(_LOSSES)}, got {shown(mode)}")


@computed(words="parameters of losses that this system does not have")
def _loss_option(context: ConversionContext, leaf: KeyPath) -> Result:
    mode = context.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    if mode in _LOSSES or leaf.value is None:
        return implicit(f"no effect with loss_mode = {mode}")
    return no_counterpart(
        VERL.reason(f"{ACTOR}.policy_loss.loss_mode={mode}") or "a loss without counterpart"
    )


@computed(
    f"{POLICY}.rollout_correction.weights",
    f"{POLICY}.rollout_correction.cap",
    words="token weights cut at this cap; −1: off",
)
def _tis_cap(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or values.number(leaf.value) <= 0:
        return implicit("negative: off")
    prefix = f"{POLICY}.rollout_correction"
    return mapped((f"{prefix}.weights", "token"), (f"{prefix}.cap", values.number(leaf.value)))


# --- the rest -----------------------------------------------------------------------------------------------


def _small() -> tuple[Rule, ...]:
    chunks = to.always("log-probs and entropy are always computed in chunks")
    table = {
        "strategy": to.always(_STRATEGY),
        "use_torch_compile": to.given(
            lambda context: not is_veomni(context),
            "veomni.use_torch_compile counts for this strategy",
            compiled("train.compile"),
        ),
        "rollout_n": to.always("repeats actor_rollout_ref.rollout.n"),
        "load_weight": to.always("the policy's weights are always loaded"),
        "calculate_entropy": to.always("entropy is always a metric"),
        INFERENCE_BATCHES: to.always(INFERENCE_REASON),
        "calculate_sum_pi_squared": lacking(False),
        "use_prefix_grouper": to.always(
            "changes speed only; prompts are shared by the engine's prefix cache"
        ),
        "use_fused_kernels": chunks,
        "use_remove_padding": to.flag("train.sequence_packing"),
        _CHUNKED: chunks,
        "entropy_checkpointing": to.always("entropy is always recomputed in backward"),
        "pad_to_length": to.always(_PADDING),
        "freeze_vision_tower": lacking(False),
        "router_replay.mode": router_replay,
        "router_replay.*": lacking(),
        "qat.*": switched(f"{ACTOR}.qat.enable"),
    }
    return rules_below(ACTOR, table, defaults={"use_torch_compile": True})


@computed("reference.model_name_or_path", words="where it is not the policy's")
def _reference_path(context: ConversionContext, leaf: KeyPath) -> Result:
    if leaf.value is None or leaf.value == context.get("actor_rollout_ref.model.path", None):
        return implicit("the policy's own model")
    return to.path("reference.model_name_or_path").run(context, leaf)
