"""Probes of the loss: its clipping, aggregation, advantages, KLs, corrections and masks, read from the gradient."""

from __future__ import annotations

from schema.config import Config
from tests.liveness.probe import UNSET, Place, changed, grpo, under, watch
from tests.liveness.trained import (
    MODELS,
    POLICY,
    WITH_KL,
    after_steps,
    gradient,
    gradient_over,
    open_clip,
    policy,
    sharded_modules,
    step_metrics,
    trainer_of,
    unclipped,
)
from tests.policy_worker.material import cut_short, random_samples, with_kept_sets, with_shared_prefixes

SAMPLING, CORRECTION, IN_REWARD = "rollout.sampling_config", f"{POLICY}.rollout_correction", f"{POLICY}.kl_in_reward"
MASKS, SHAPING = f"{POLICY}.sample_masks", f"{POLICY}.reward_shaping"

watch(
    gradient,
    unclipped,
    policy(
        variant=("grpo", "gspo"),
        advantage_estimator=("grpo", "rloo"),
        whiten_advantages=(False, True),
        advantage_clip=(0.1, 0.5),
        temperature=(1.0, 0.7),
        epsilon_low=(0.1, 0.3),
        epsilon_high=(0.1, 0.3),
        positive_nll_coef=(0.1, 0.5),
        lower_bound_ratio=(3.0, 1.05),
        loss_type=("token-mean", "seq-mean-token-sum"),
        unbiased_advantage=(False, True),
        entropy_coeff=(0.0, 0.1),
        kl_beta=(0.0, 0.1),
    )
    | {f"{IN_REWARD}.beta": (0.0, 0.1), f"{SAMPLING}.temperature": (1.0, 0.7)},
)
watch(gradient, open_clip, policy(aipo_rho=(1.05, 1.2)))
by_sequence = changed(unclipped, policy(loss_type="seq-mean-token-mean"))
watch(gradient, by_sequence, policy(unbiased_loss_max_tokens=(17, 5)))
decoupled = changed(unclipped, policy(use_decoupled_loss=True))
watch(gradient, decoupled, policy(use_decoupled_loss=(True, False), behav_imp_weight_cap=(1.1, 1.5)))
weighed = changed(unclipped, {f"{CORRECTION}.weights": "token"})
watch(gradient, weighed, under(CORRECTION, weights=("token", "sequence"), cap=(1.1, 1.5)))
watch(
    gradient,
    changed(unclipped, under(CORRECTION, reject="token", reject_above=1.2)),
    under(
        CORRECTION,
        reject=("token", "sequence"),
        reject_below=(UNSET, 0.8),
        reject_above=(1.1, 1.4),
        off_policy_mask=(UNSET, 0.01),
    ),
)
watch(
    gradient,
    changed(unclipped, WITH_KL),
    policy(kl_type=("k3", "full"), unbiased_kl_estimate=(False, True))
    | {f"{IN_REWARD}.type": ("k1", "k2"), "reference.model_name_or_path": MODELS},
)
returns = changed(unclipped, policy(advantage_estimator="reinforce_plus_plus", whiten_advantages=False))
shaping = under(SHAPING, center=("none", "group"), scale=("none", "group"), clip=(0.1, 0.5))
watch(gradient, returns, policy(gamma=(1.0, 0.9)) | shaping)
gradient_of_drawn = gradient_over(with_kept_sets, "gradient_of_drawn")
watch(
    gradient_of_drawn,
    unclipped,
    under(
        SAMPLING,
        top_k=(-1, 20),
        top_p=(1.0, 0.9),
        min_p=(0.0, 0.1),
        repetition_penalty=(1.0, 1.2),
        presence_penalty=(0.0, 0.5),
        frequency_penalty=(0.0, 0.5),
        min_tokens=(0, 3),
    ),
)
filtered = changed(unclipped, under(SAMPLING, top_k=20))
watch(gradient_of_drawn, filtered, under(SAMPLING, sampling_correction=("exact", "raw")))
gradient_of_alike_beginnings = gradient_over(with_shared_prefixes, "gradient_of_alike_beginnings")
watch(gradient_of_alike_beginnings, unclipped, policy(min_filter_prefix_tokens=(UNSET, 2)))
watch(
    gradient_over(lambda _: cut_short(random_samples(12, n_masked=1)), "gradient_of_short_and_cut"),
    unclipped,
    under(
        MASKS,
        truncated=(False, True),
        mean_score_above=(UNSET, 0.5),
        mean_score_below=(UNSET, 0.75),
        failed_from_tokens=(UNSET, 4),
    ),
)
half = gradient_over(list, "gradient_of_half", world=2)
watch(half, changed(unclipped, policy(mini_batch=12)), policy(balance_dp_token=(False, True)))
watch(step_metrics, grpo, under("train", metrics_of_all_samples=(False, True)))
watch(step_metrics, grpo, policy(mu_iterations=(1, 2), batch_size_per_optimize=(8, 4)))

# ---- the reference model --------------------------------------------------------------------------------------


def after_two_steps(config: Config, place: Place) -> tuple[float, int, float]:
    """A sum of the reference model's weights, steps in the optimizer's state, the coefficient of the KL."""
    trainer = after_steps(config, place, 2)
    weights = sum(float(p.double().abs().sum()) for p in trainer.reference.parameters())
    (counted, *_) = (int(slots["step"]) for slots in trainer.optimizer.optimizers[0].state.values())
    return weights, counted, trainer.kl_coefficient


def place_of_the_reference(config: Config, place: Place) -> list[str]:
    """Where FSDP keeps the weights of the reference model between its passes; nothing where it does not shard it."""
    sharded = sharded_modules(trainer_of(config, place).reference)
    return [type(kept.offload_policy).__name__ for _, kept in sharded]


def units_of_the_reference(config: Config, place: Place) -> list[str]:
    """Which of its modules FSDP shards one by one."""
    return [name for name, _ in sharded_modules(trainer_of(config, place).reference)]


resets = changed(unclipped, WITH_KL)
watch(after_two_steps, resets, policy(reference_reset_interval=(UNSET, 1)))
resetting = changed(resets, policy(reference_reset_interval=1))
watch(after_two_steps, resetting, policy(reset_optimizer_with_reference=(True, False)))
adaptive = changed(resets, under(IN_REWARD, controller="adaptive", target=1e-4, horizon=100))
watch(after_two_steps, adaptive, under(IN_REWARD, target=(1e-4, 10.0), horizon=(100, 1000)))
watch(after_two_steps, resets, under(IN_REWARD, controller=("fixed", "adaptive")))
watch(place_of_the_reference, resets, under("reference", offload=(False, True)))
offloaded = changed(resets, under("reference", offload=True))
wrapped = under("reference", fsdp_wrap_layers=([], ["Qwen3MLP"]), fsdp_wrap_min_params=(0, 3000))
watch(units_of_the_reference, offloaded, wrapped)
