"""`[train.train_policy]`: the algorithm and its data, a union tagged by `type` = "grpo" | "sft"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from schema.config.base import (
    MAX_TEMPERATURE,
    MOST_PROCESSES,
    MOST_SAMPLES,
    MOST_TOKENS,
    CustomCode,
    NonEmptyStr,
    RewardSpec,
    Section,
    UnitFloat,
    reward_weights,
)
from schema.config.sections.dataset import DatasetConfig


class OverlongRewardConfig(Section):
    """Soft penalty on answers that come close to `rollout.max_response_length` (DAPO, eq. 13)."""

    enable_overlong_penalty: bool = Field(
        default=False,
        description="Whether answers that reach into the buffer before the maximal length are penalised.",
    )
    buffer_length: int = Field(
        default=4096,
        ge=1,
        le=MOST_TOKENS,
        description="Length of the buffer in tokens: the penalty begins at max_response_length - "
        "buffer_length.",
    )
    penalty_factor: float = Field(
        default=1.0,
        ge=0.0,
        description="Penalty at the maximal length; it grows linearly from 0 at the beginning of the buffer.",
    )


KlEstimator = Literal["k1", "abs", "k2", "k3", "full"]


class KlInRewardConfig(Section):
    """`[train.train_policy.kl_in_reward]`: the KL to the reference model as a part of the reward."""

    beta: float = Field(
        default=0.0, ge=0.0, description="Coefficient (the first one, if adaptive); 0: no KL in the reward."
    )
    type: KlEstimator = Field(default="k1", description="How the KL of a token is estimated; see kl_type.")
    controller: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="Whether the coefficient stays, or follows the measured KL to `target`."
    )
    target: float = Field(default=0.1, gt=0.0, description="Adaptive: the KL that is aimed at.")
    horizon: int = Field(
        default=10000, ge=1, description="Adaptive: samples over which the coefficient adapts."
    )


class RolloutCorrectionConfig(Section):
    """`[train.train_policy.rollout_correction]`: what engine and trainer disagree about, corrected."""

    weights: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="Importance weights between the trainer's old policy and the engine's, per token or per "
        "sequence.",
    )
    cap: float = Field(default=2.0, gt=0.0, description="Weights are truncated at this value.")
    reject: Literal["none", "token", "sequence", "geometric"] = Field(
        default="none",
        description="What is left out of the loss when its ratio is out of bounds: single tokens, or sequences by "
        "their product or geometric mean.",
    )
    reject_below: float | None = Field(
        default=None, gt=0.0, description="Lower bound of the ratio. Unset: none."
    )
    reject_above: float | None = Field(
        default=None, gt=0.0, description="Upper bound of the ratio. Unset: none."
    )


class LogProbPassConfig(Section):
    """`[train.train_policy.old_log_prob]`: the trainer's own pass for the log-probs of the old policy."""

    mini_batch: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SAMPLES,
        description="Samples per micro-batch of the pass. Unset: as in training.",
    )
    max_token_len_per_mini_batch: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="Hard cap on the tokens of a micro-batch. Unset: as in training.",
    )


class _DataloaderConfig(Section):
    """Keys that every algorithm shares."""

    dataset: DatasetConfig = Field(default_factory=DatasetConfig, description="The training data.")
    dataloader_shuffle: bool = Field(
        default=True,
        description="Whether each epoch is shuffled (seeded); false keeps the order of the dataset.",
    )
    enable_dataset_cache: bool = Field(
        default=False, description="Whether processed rows are cached on disk."
    )
    dataloader_num_workers: int = Field(
        default=0, ge=0, le=MOST_PROCESSES, description="Processes that prepare data ahead; 0: none."
    )
    dataloader_prefetch_factor: int | None = Field(
        default=None, ge=1, description="Batches that each data worker loads in advance."
    )
    mini_batch: int = Field(
        default=2,
        ge=1,
        le=MOST_SAMPLES,
        description="Samples per micro-batch: one optimizer step is split into micro-batches of at most "
        "this many samples to fit into memory. It never changes the gradient.",
    )
    max_token_len_per_mini_batch: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="Hard cap on the tokens of a micro-batch. When set, micro-batches are sized by tokens "
        "and `mini_batch` is not used.",
    )


class GrpoConfig(_DataloaderConfig):
    """Group-relative policy optimisation and its variants."""

    type: Literal["grpo"] = Field(
        default="grpo", description="The algorithm: reinforcement learning on groups."
    )
    variant: Literal["grpo", "dapo", "gspo", "cispo", "reinforce"] | CustomCode = Field(
        default="grpo",
        description="Policy loss: `grpo` and `dapo` clip per token, `gspo` clips the ratio of the whole "
        "sequence, `cispo` clips the weight and keeps every gradient, `reinforce` has no ratio. Your own: "
        '"path/to/file.py:function".',
    )
    advantage_estimator: (
        Literal[
            "grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "opo",
            "remax",
            "gpg",
            "pass_at_k",
            "gae",
        ]
        | CustomCode
    ) = Field(
        default="grpo",
        description="How rewards become advantages. `gae` needs the critic. Your own: "
        '"path/to/file.py:function".',
    )
    gamma: UnitFloat = Field(default=1.0, description="Discount of later rewards (gae, reinforce_plus_plus).")
    gae_lambda: UnitFloat = Field(default=1.0, description="gae: trade-off between bias and variance.")
    dataloader_batch_size: int | None = Field(
        default=1, ge=1, description="Prompts that the controller's data loader prepares per iteration."
    )
    prompt_column_name: str = Field(default="", description="Column of the prompt. Empty: `prompt`.")
    response_column_name: str = Field(
        default="", description="Column of the reference answer. Empty: the reward functions get none."
    )
    reward_function: RewardSpec = Field(
        default={"single_choice": 1.0},
        description="Reward functions: a name, a list of names, or a table name = weight. Built in: "
        "single_choice, boxed_math, gsm8k, format, and by_source (chosen by the row's data source). Your own: "
        '"path/to/file.py:function" (relative to the current directory).',
    )
    data_source_column_name: NonEmptyStr = Field(
        default="data_source",
        description="Column that names a row's source, for the reward function by_source; every reward finds "
        'it as `row["data_source"]`.',
    )
    domain_column_name: str = Field(
        default="", description="Column that names a row's domain, for domain_shares. Empty: none."
    )
    domain_shares: dict[str, float] = Field(
        default={},
        description="Share of each domain among the prompts: domain = share. Empty: as in the data.",
    )
    filter_reward_metric: str | list[str] = Field(
        default=[],
        description="Dynamic sampling (DAPO): groups whose samples all have the same value of these reward "
        "functions are dropped and replaced. Empty: no filter.",
    )
    temperature: float = Field(
        default=1.0,
        ge=0.0,
        le=MAX_TEMPERATURE,
        description="Sampling temperature of training rollouts, at least 0.01 and at most 100. The same as "
        "rollout.sampling_config.temperature: write it in one place.",
    )
    epsilon_low: float = Field(
        default=0.2, ge=0.0, lt=1.0, description="The ratio is clipped from below at 1 - epsilon_low."
    )
    epsilon_high: float = Field(
        default=0.2,
        ge=0.0,
        description="The ratio is clipped from above at 1 + epsilon_high; DAPO recommends 0.28.",
    )
    positive_nll_coef: float | None = Field(
        default=None,
        ge=0.0,
        description="Coefficient of an extra language-model loss on samples with positive reward. Unset: "
        "none.",
    )
    lower_bound_ratio: float = Field(
        default=3.0,
        gt=1.0,
        description="Dual clip: with a negative advantage the loss is bounded at this multiple of it.",
    )
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        default="token-mean",
        description="How token losses become one number: mean over all tokens of the step; or summed per "
        "sequence, or averaged per sequence, then averaged over sequences.",
    )
    unbiased_loss_max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=MOST_TOKENS,
        description="Dr. GRPO: divide each sequence's loss by this constant instead of its own length. Only "
        "with loss_type = seq-mean-token-mean.",
    )
    unbiased_advantage: bool = Field(
        default=False,
        description="Dr. GRPO: true leaves out the division of the advantage by the standard deviation of "
        "the group's rewards; false divides.",
    )
    overlong_reward: OverlongRewardConfig = Field(
        default_factory=OverlongRewardConfig, description="Penalty on answers that are too long."
    )
    kl_beta: float = Field(
        default=0.0,
        ge=0.0,
        description="Coefficient of the KL term against the reference model; 0: no reference model.",
    )
    kl_type: KlEstimator = Field(
        default="k3",
        description="How the KL to the reference is estimated in the loss: k1, abs, k2 (mse), k3 (low variance), "
        "or full (over the whole vocabulary).",
    )
    unbiased_kl_estimate: bool = Field(
        default=False, description="Whether the KL term is weighted by the importance ratio."
    )
    kl_in_reward: KlInRewardConfig = Field(
        default_factory=KlInRewardConfig, description="The KL to the reference model inside the reward."
    )
    rollout_correction: RolloutCorrectionConfig = Field(
        default_factory=RolloutCorrectionConfig,
        description="Correction of the mismatch between inference engine and trainer.",
    )
    old_log_prob: LogProbPassConfig = Field(
        default_factory=LogProbPassConfig, description="Budget of the pass for the old policy's log-probs."
    )
    aipo_rho: float | None = Field(
        default=None,
        gt=0.0,
        description="AIPO: importance ratios are truncated at this constant instead of clipped; 2 to 10 is "
        "usual (arXiv 2505.24034).",
    )
    mu_iterations: int = Field(default=1, ge=1, description="Passes over each batch (the paper's mu).")
    batch_size_per_optimize: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SAMPLES,
        description="Samples per optimizer step: the batch of a training step is cut into pieces of this "
        "size, one optimizer step each. Unset: one optimizer step for the whole batch.",
    )
    mini_batch_shuffle: bool = Field(
        default=False, description="Whether samples are shuffled (seeded) before each pass of mu_iterations."
    )
    mini_batch_shuffle_seed: int | None = Field(
        default=None, ge=0, lt=2**32, description="Seed of that shuffle. Unset: the seed of the job."
    )
    entropy_coeff: float = Field(default=0.0, description="Coefficient of the entropy bonus (with gradient).")
    allowed_outdated_steps: int = Field(
        default=4,
        ge=0,
        description="Staleness bound S: no token is trained on by a step later than the weight version that "
        "made it plus S. At most (S + 1) * groups_per_step groups are outstanding. 0: on-policy.",
    )
    on_policy: bool = Field(
        default=False,
        description="Fully synchronous rollout: the same as allowed_outdated_steps = 0, and in its place.",
    )
    outdated_rollout_fetch_batch_size: int = Field(
        default=1,
        ge=0,
        description="Groups that a rollout replica may lease per request while its weights are not the "
        "newest. 0: none until it has updated.",
    )
    min_filter_prefix_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Token prefixes at least this long that samples of one group share although their "
        "rewards differ get no loss. Unset: off.",
    )
    max_retry_for_on_policy: int = Field(
        default=10,
        description="How many refills dynamic sampling may ask for one step before the run ends with an "
        "error; 0 or less: no limit.",
    )
    reference_reset_interval: int | None = Field(
        default=None,
        ge=0,
        description="The reference model becomes a copy of the current one every so many steps. Unset or 0: "
        "never.",
    )
    reset_optimizer_with_reference: bool = Field(
        default=True, description="Whether the optimizer's state is reset together with the reference model."
    )
    balance_dp_token: bool = Field(
        default=False,
        description="Whether samples are dealt to data-parallel ranks so that their token counts are "
        "balanced. It never changes the gradient.",
    )
    use_decoupled_loss: bool = Field(
        default=False,
        description="Clip against a proximal policy recomputed by the trainer, and weight by its ratio to "
        "the behaviour policy. False: clip against the behaviour policy itself.",
    )
    behav_imp_weight_cap: float | None = Field(
        default=None,
        gt=0.0,
        description="Tokens whose behaviour importance weight exceeds this cap get no loss.",
    )
    rollout_as_token_ids: bool = Field(
        default=False,
        description="Samples always travel as token ids; false sends the decoded text along with them.",
    )

    @property
    def reward_weights(self) -> dict[str, float]:
        """Reward function -> weight, however it was written."""
        return reward_weights(self.reward_function)

    @property
    def filter_metrics(self) -> list[str]:
        """`filter_reward_metric` as a list; empty: no filter."""
        metric = self.filter_reward_metric
        return ([metric] if metric else []) if isinstance(metric, str) else list(metric)

    @property
    def prompt_column(self) -> str:
        """The prompt's column, with its default resolved."""
        return self.prompt_column_name or "prompt"


class SFTDataConfig(_DataloaderConfig):
    """Supervised fine-tuning on conversations."""

    type: Literal["sft"] = Field(description="The algorithm: supervised fine-tuning.")
    conversation_column_name: NonEmptyStr = Field(
        default="conversations",
        description="Column of the conversation: a list of {role, content} or its JSON text.",
    )
    prompt_column_name: str = Field(
        default="",
        description="Column of the question (text, or messages), in place of a conversation; with "
        "response_column_name.",
    )
    response_column_name: str = Field(
        default="", description="Column of the answer to learn, in place of a conversation."
    )
    system_prompt: str = Field(
        default="", description="System prompt put before each conversation. Empty: none."
    )
    balance_dp_token: bool = Field(
        default=True,
        description="Whether samples are dealt to data-parallel ranks so that their token counts are "
        "balanced. It never changes the gradient.",
    )

    @property
    def has_pairs(self) -> bool:
        """Whether rows are a prompt and a response instead of a conversation."""
        return bool(self.prompt_column_name and self.response_column_name)


def _tag(value: Any) -> str:
    """The tag of a train policy as written; a table without `type` is grpo, the default."""
    tag = value.get("type", "grpo") if isinstance(value, dict) else getattr(value, "type", "grpo")
    return tag if isinstance(tag, str) else repr(tag)


TrainPolicy = Annotated[
    Annotated[GrpoConfig, Tag("grpo")] | Annotated[SFTDataConfig, Tag("sft")],
    Discriminator(_tag),
]
