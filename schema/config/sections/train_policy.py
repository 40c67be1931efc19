"""`[train.train_policy]`: the algorithm and its data, a union tagged by `type` = "grpo" | "sft"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from schema.config.algorithms import ESTIMATORS, EstimatorName, LossName
from schema.config.base import (
    MAX_TEMPERATURE,
    MOST_PROCESSES,
    Count,
    CustomCode,
    Natural,
    NonEmptyStr,
    NotNegative,
    Positive,
    RewardSpec,
    Samples,
    Section,
    Seed,
    Tokens,
    UnitFloat,
    reward_weights,
)
from schema.config.key import cosmos_key, key
from schema.config.sections.curriculum import CurriculumConfig
from schema.config.sections.dataset import CACHE_GIB, DatasetConfig
from schema.config.sections.reward import BUILTIN_REWARDS

_LOSS = "number: Loss and gradient."
_ADVANTAGES = "number: Advantages, and with them the gradient."
_LONG_ANSWERS = "number: Score of a long answer."
_COEFFICIENT = "number: `kl_coefficient` of the next step."
_TOKENS = "file: Tokens of a prepared row."


# fmt: off
class OverlongRewardConfig(Section):
    """Soft penalty on answers that come close to `rollout.max_response_length` (DAPO, eq. 13)."""

    enable_overlong_penalty: bool = cosmos_key(False,
        "Whether answers that reach into the buffer before the maximal length are penalised.", acts=_LONG_ANSWERS)
    buffer_length: Tokens = cosmos_key(4096,
        "Length of the buffer in tokens: the penalty begins at max_response_length - buffer_length.",
        acts=_LONG_ANSWERS)
    penalty_factor: NotNegative = cosmos_key(1.0,
        "Penalty at the maximal length; it grows linearly from 0 at the beginning of the buffer.", acts=_LONG_ANSWERS)


class RewardShapingConfig(Section):
    """`[train.train_policy.reward_shaping]`: scores are centred, scaled and clipped, then compared."""

    center: Literal["none", "group", "batch"] = key("none",
        "Whose mean is subtracted from each score: that of its group, of all samples of the step, or none.",
        acts=_ADVANTAGES)
    scale: Literal["none", "group", "batch"] = key("none",
        "By whose standard deviation each score is divided: that of its group, of all samples of the step, or none.",
        acts=_ADVANTAGES)
    clip: Positive | None = key(None,
        "Scores are cut to the range from -clip to clip, after centring and scaling. Unset: they are not.",
        acts=_ADVANTAGES, example=5.0)


class SampleMasksConfig(Section):
    """`[train.train_policy.sample_masks]`: samples that get no loss, but count in their group's statistics."""

    truncated: bool = key(False, "Whether answers that end at rollout.max_response_length get no loss.", acts=_LOSS)
    mean_score_above: float | None = key(None,
        "Groups get a loss only if the mean score of their samples is above this: harder prompts get none. Unset: "
        "however hard.", acts=_LOSS, example=0.1)
    mean_score_below: float | None = key(None,
        "Groups get a loss only if the mean score of their samples is below this: easier prompts get none. Unset: "
        "however easy.", acts=_LOSS, example=0.95)
    failed_from_tokens: Tokens | None = key(None,
        "Answers of so many tokens or more that score 0 or less get no loss. Unset: however long.", acts=_LOSS,
        example=1024)


KlEstimator = Literal["k1", "abs", "k2", "k3", "full"]


class KlInRewardConfig(Section):
    """`[train.train_policy.kl_in_reward]`: the KL to the reference model as a part of the reward."""

    beta: NotNegative = key(0.0, "Coefficient (the first one, if adaptive); 0: no KL in the reward.",
        acts=_ADVANTAGES)
    type: KlEstimator = key("k1", "How the KL of a token is estimated; see kl_type.", acts=_ADVANTAGES)
    controller: Literal["fixed", "adaptive"] = key("fixed",
        "Whether the coefficient stays, or follows the measured KL to `target`.", acts=_COEFFICIENT)
    target: Positive = key(0.1, "Adaptive: the KL that is aimed at.", acts=_COEFFICIENT)
    horizon: Count = key(10000, "Adaptive: samples over which the coefficient adapts.", acts=_COEFFICIENT)


class RolloutCorrectionConfig(Section):
    """`[train.train_policy.rollout_correction]`: what engine and trainer disagree about, corrected."""

    weights: Literal["none", "token", "sequence"] = key("none",
        "Importance weights between the trainer's old policy and the engine's, per token or per sequence. The "
        "trainer computes the old policy's log-probs once per step, and the ratio is clipped against them.",
        acts=_LOSS)
    cap: Positive = key(2.0, "Weights are truncated at this value.", acts=_LOSS)
    reject: Literal["none", "token", "sequence", "geometric"] = key("none",
        "What is left out of the loss when its ratio is out of bounds: single tokens, or sequences by their product "
        "or geometric mean.", acts=_LOSS)
    reject_below: Positive | None = key(None, "Lower bound of the ratio. Unset: none.", example=0.5, acts=_LOSS)
    reject_above: Positive | None = key(None, "Upper bound of the ratio. Unset: none.", example=2.0, acts=_LOSS)
    off_policy_mask: Positive | None = key(None,
        "Samples with a negative advantage leave the loss when the mean log ratio of the policy that made their "
        "tokens to the old policy is above this (DeepSeek-V3.2). Unset: none do.", acts=_LOSS, example=0.05)

    @property
    def needs_old(self) -> bool:
        """Whether any of it compares with the log-probs of the old policy."""
        return not (self.weights == self.reject == "none" and self.off_policy_mask is None)


class LogProbPassConfig(Section):
    """`[train.train_policy.old_log_prob]`: the trainer's own pass for the log-probs of the old policy."""

    mini_batch: Samples | None = key(None, "Samples per micro-batch of the pass. Unset: as in training.",
        acts="number: Rows of a micro-batch of the pass.", example=4)
    max_token_len_per_mini_batch: Tokens | None = key(None,
        "Hard cap on the tokens of a micro-batch. Unset: as in training.",
        acts="number: Rows of a micro-batch of the pass.", example=16384)


class _DataloaderConfig(Section):
    """Keys that every algorithm shares."""

    dataset: DatasetConfig = cosmos_key(DatasetConfig, "The training data.")
    dataloader_shuffle: bool = cosmos_key(True,
        "Whether each epoch is shuffled (seeded); false keeps the order of the dataset.",
        acts="request or reply: Order of the rows.")
    domain_exhausted: Literal["repeat", "stop"] = key("repeat",
        "Where parts or domains have shares: `repeat` passes through each as often as its share takes, and an epoch "
        "is as many groups as there are rows; `stop` ends the job where the first of them has been passed through "
        "train.epoch times.", acts="request or reply: When the job is out of prompts.")
    curriculum: CurriculumConfig = key(CurriculumConfig, "Which prompts come when.")
    enable_dataset_cache: bool = cosmos_key(False,
        "Whether prepared rows are kept in `dataset_cache_dir` for other jobs, which use them as long as data, "
        "tokenizer, chat template, all keys that decide what rows are, and the version of this program are the same.",
        acts="file: Where prepared rows come from.")
    dataset_cache_dir: str = key("",
        "Directory of the cache of data: copies of files that `dataset` names by an address lie in its `files`, "
        "prepared rows in its `rows`. Jobs may share it. Empty: `cosmos-launch` in $XDG_CACHE_HOME, else in "
        "~/.cache.",
        acts="file: Where copies of remote files lie.", example="/scratch/cache")
    dataset_cache_size: Positive = key(CACHE_GIB,
        "GiB that the cache of data may have: what was not of use for the longest time is removed when more is to be "
        "fetched or kept, but no copy that a running job uses.", acts="file: Which copies of remote files stay.")
    dataloader_num_workers: int = cosmos_key(0,
        "Processes that render and tokenise the rows; 0: the preparation itself does. The rows are the same.",
        ge=0, le=MOST_PROCESSES, acts="process: Processes of the preparation.")
    dataloader_prefetch_factor: Count | None = cosmos_key(None,
        "Batches that each of these processes prepares in advance. Unset: 2.", example=4,
        acts="process: How far a process of the preparation is ahead.")
    system_prompt: str = cosmos_key("",
        "System prompt put before each prompt or conversation that has none of its own. Empty: none.", acts=_TOKENS,
        example="You are a careful mathematician.")
    system_prompt_column_name: str = key("",
        "Column of a row's own system prompt, in place of `system_prompt`; dots reach into structs. A row whose "
        "value is empty has `system_prompt`, a conversation that begins with a system message keeps that. Empty: "
        "none.",
        acts=_TOKENS, example="system")
    tools_column_name: str = key("tools",
        "Column of the tools that the chat template gets for a row: a list of definitions, or its JSON text; dots "
        "reach into structs. Empty: none.", acts=_TOKENS, example="extra_info.tools")
    mini_batch: Samples = cosmos_key(2,
        "Samples per micro-batch: one optimizer step is split into micro-batches of at most this many samples to fit "
        "into memory. It never changes the gradient.", acts="number: Rows of a micro-batch.")
    max_token_len_per_mini_batch: Tokens | None = cosmos_key(None,
        "Hard cap on the tokens of a micro-batch. When set, micro-batches are sized by tokens and `mini_batch` is "
        "not used.", acts="number: Rows of a micro-batch.", example=16384)


    @property
    def optional_columns(self) -> dict[str, str]:
        """Columns that rows may lack and the user has named: some row of the data has them, or the name is wrong."""
        named = {"system_prompt_column_name": self.system_prompt_column_name}
        named |= {"tools_column_name": self.tools_column_name} if self.tools_column_name != "tools" else {}
        return {key: column for key, column in named.items() if column}


class GrpoConfig(_DataloaderConfig):
    """Group-relative policy optimisation and its variants."""

    type: Literal["grpo"] = cosmos_key("grpo", "The algorithm: reinforcement learning on groups.",
        acts="process: Which roles are started and what is trained.")
    variant: LossName | CustomCode = cosmos_key("grpo",
        "Policy loss: `grpo` and `dapo` clip per token, `gspo` clips the ratio of the whole sequence, `cispo` clips "
        "the weight and keeps every gradient, `reinforce` has no ratio, `geo_mean` (GMPO) takes the geometric mean "
        'of a sequence\'s ratios, `sapo` a soft gate in place of the clip. Your own: "path/to/file.py:function".',
        acts=_LOSS)
    advantage_estimator: EstimatorName | CustomCode = key("grpo",
        "How rewards become advantages. `gae` needs the critic. With `remax` each group has one more sample, decoded "
        "greedily: its score is the baseline of the others, it is not trained and counts in no batch size. Where its "
        "reward fails it is made again, or the group dropped, as reward.on_error says (`mask` drops it, too); where "
        'it is overlong, the group is dropped. Your own: "path/to/file.py:function".', acts=_ADVANTAGES)
    gamma: UnitFloat = key(1.0, "Discount of later rewards (gae, reinforce_plus_plus).", acts=_ADVANTAGES)
    gae_lambda: UnitFloat = key(1.0, "gae: trade-off between bias and variance.", acts=_ADVANTAGES)
    whiten_advantages: bool | None = key(None,
        "Whether advantages are whitened over all tokens of the step: mean 0, variance 1. Unset: as the estimator is "
        "defined; gae, reinforce_plus_plus and reinforce_plus_plus_baseline whiten.", acts=_ADVANTAGES, example=True)
    advantage_clip: Positive | None = key(None,
        "Advantages are cut to the range from -advantage_clip to advantage_clip, last of all. Unset: they are not.",
        acts=_ADVANTAGES, example=2.0)
    dataloader_batch_size: Count | None = cosmos_key(1,
        "Rows that are rendered and tokenised at once. Fewer than 256 count as 256: they would only take longer.",
        acts="process: Rows of a batch of the preparation.")
    prompt_column_name: str = cosmos_key("", "Column of the prompt. Empty: `prompt`.",
        acts="file: Tokens and `prompt` of a prepared row.", example="question")
    response_column_name: str = cosmos_key("",
        'Column of the reference answer, which reward functions find as `row["answer"]`. Empty: they get none.',
        acts="file: `answer` of a prepared row.", example="answer")
    reward_function: RewardSpec = cosmos_key({"single_choice": 1.0},
        "Reward functions: a name, a list of names, or a table name = weight. Built in: "
        f"{', '.join(BUILTIN_REWARDS)} (by_source: chosen by the row's data source). Your own: "
        '"path/to/file.py:function" (relative to the current directory), such as '
        'def score(completion: str, row: dict) -> float: return float(row["answer"] in completion). '
        "cosmos-launch try-reward shows what they return.", acts="request or reply: Rewards and score of a sample.",
        example={"boxed_math": 1.0, "format": 0.2})
    data_source_column_name: NonEmptyStr = key("data_source",
        "Column that names a row's source, for the reward function by_source; every reward finds it as "
        '`row["data_source"]`.', acts="file: `data_source` of a prepared row.")
    domain_column_name: str = key("",
        "Column that names a row's domain, for domain_shares; dots reach into structs. Empty: none.",
        acts="file: The domain of a prepared row.", example="domain")
    domain_shares: dict[str, float] = key({},
        "Share of each domain among the prompts that are trained, which add up to 1: domain = share. Rows of "
        "domains without one are left out and counted. Empty: as in the data.",
        acts="request or reply: Which domain the next prompt is of.", example={"math": 0.7, "code": 0.3})
    filter_reward_metric: str | list[str] = cosmos_key([],
        "Dynamic sampling (DAPO): groups whose samples all have the same value of these reward functions are dropped "
        'and replaced; with advantage_estimator = "remax" the greedy sample is one of them, since equal samples that '
        "differ from it still say something. Empty: no filter.",
        acts="request or reply: Groups dropped as `zero_variance`.", example=["boxed_math"])
    temperature: float = cosmos_key(1.0,
        "Sampling temperature of training rollouts, at least 0.01 and at most 100. The same as "
        "rollout.sampling_config.temperature: write it in one place.", ge=0.0, le=MAX_TEMPERATURE,
        acts="sampling parameter: `temperature` of training rollouts; the trainer's logits.")
    epsilon_low: float = cosmos_key(0.2, "The ratio is clipped from below at 1 - epsilon_low; negative: it is not.",
        lt=1.0, acts="number: Gradient where the ratio is clipped.")
    epsilon_high: float = cosmos_key(0.2,
        "The ratio is clipped from above at 1 + epsilon_high; DAPO recommends 0.28. Negative: it is not.",
        acts="number: Gradient where the ratio is clipped.")
    positive_nll_coef: NotNegative | None = cosmos_key(None,
        "Coefficient of an extra language-model loss on samples with positive reward. Unset: none.", acts=_LOSS,
        example=0.1)
    lower_bound_ratio: float = cosmos_key(3.0,
        "Dual clip: with a negative advantage the loss is bounded at this multiple of it.", gt=1.0,
        acts="number: Gradient where the dual clip acts.")
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"] = cosmos_key(
        "token-mean",
        "How token losses become one number: mean over all tokens of the step; or summed per sequence, or averaged "
        "per sequence, then averaged over sequences; or their sum.", acts=_LOSS)
    unbiased_loss_max_tokens: Tokens | None = cosmos_key(None,
        "Dr. GRPO: divide each sequence's loss by this constant instead of its own length. Only with loss_type = "
        "seq-mean-token-mean.", acts=_LOSS, example=2048)
    unbiased_advantage: bool = cosmos_key(False,
        "Dr. GRPO: true leaves out the division of the advantage by the standard deviation of the group's rewards; "
        "false divides.", acts=_ADVANTAGES)
    overlong_reward: OverlongRewardConfig = cosmos_key(OverlongRewardConfig, "Penalty on answers that are too long.")
    reward_shaping: RewardShapingConfig = key(RewardShapingConfig,
        "What becomes of scores before the advantage estimator sees them.")
    sample_masks: SampleMasksConfig = key(SampleMasksConfig, "Samples that get no loss, by length and difficulty.")
    kl_beta: NotNegative = cosmos_key(0.0,
        "Coefficient of the KL term against the reference model; 0: no KL in the loss.", acts=_LOSS)
    kl_type: KlEstimator = key("k3",
        "How the KL to the reference is estimated in the loss: k1, abs, k2 (mse), k3 (low variance), or full (over "
        "the whole vocabulary).", acts=_LOSS)
    unbiased_kl_estimate: bool = key(False, "Whether the KL term is weighted by the importance ratio.", acts=_LOSS)
    kl_in_reward: KlInRewardConfig = key(KlInRewardConfig, "The KL to the reference model inside the reward.")
    rollout_correction: RolloutCorrectionConfig = key(RolloutCorrectionConfig,
        "Correction of the mismatch between inference engine and trainer.")
    routing_replay: Literal["none", "ids", "weights"] = key("none",
        "Mixtures of experts: whether the trainer sends each token to the experts that the engine chose for it "
        "(`ids`, with its own weights for them), or gives these the engine's weights too (`weights`). `none`: to "
        "those of its own choice, which differs where two experts are almost as likely.",
        acts="number: Log-probs of the trainer, `routing/differs` of a step.")
    old_log_prob: LogProbPassConfig = key(LogProbPassConfig, "Budget of the pass for the old policy's log-probs.")
    aipo_rho: Positive | None = cosmos_key(None,
        "AIPO: importance ratios are truncated at this constant instead of clipped; 2 to 10 is usual (arXiv "
        "2505.24034).", acts=_LOSS, example=4.0)
    mu_iterations: Count = cosmos_key(1, "Passes over each batch (the paper's mu).",
        acts="metric: `optimizer_steps` of a step.")
    batch_size_per_optimize: Samples | None = cosmos_key(None,
        "Samples per optimizer step: the batch of a training step is cut into pieces of this size, one optimizer "
        "step each. Unset: one optimizer step for the whole batch.", acts="metric: `optimizer_steps` of a step.",
        example=64)
    mini_batch_shuffle: bool = key(False, "Whether samples are shuffled (seeded) before each pass of mu_iterations.",
        acts="number: Rows of each optimizer step.")
    mini_batch_shuffle_seed: Seed | None = key(None, "Seed of that shuffle. Unset: the seed of the job.",
        acts="number: Rows of each optimizer step.", example=42)
    entropy_coeff: float = cosmos_key(0.0, "Coefficient of the entropy bonus (with gradient).", acts=_LOSS)
    allowed_outdated_steps: Natural = cosmos_key(4,
        "Staleness bound S: no token is trained on by a step later than the weight version that made it plus S. At "
        "most (S + 1) * groups_per_step groups are outstanding. 0: on-policy.",
        acts="request or reply: How many groups are leased ahead of training.")
    on_policy: bool = cosmos_key(False,
        "Fully synchronous rollout: the same as allowed_outdated_steps = 0, and in its place.",
        acts="request or reply: How many groups are leased ahead of training.")
    outdated_rollout_fetch_batch_size: Natural = cosmos_key(1,
        "Groups that a rollout replica may lease per request while its weights are not the newest. 0: none until it "
        "has updated.", acts="request or reply: Groups leased to a replica of old weights.")
    min_filter_prefix_tokens: Count | None = cosmos_key(None,
        "Token prefixes at least this long that samples of one group share although their rewards differ get no "
        "loss. Unset: off.", acts=_LOSS, example=32)
    max_retry_for_on_policy: int = cosmos_key(10,
        "How many refills dynamic sampling may ask for one step: the run ends with an error where it has dropped "
        "more than this many times the groups of a step and the next step is still not full. 0 or less: no limit.",
        acts="request or reply: Phase of a job whose steps the filter of dynamic sampling leaves empty.")
    reference_reset_interval: Natural | None = cosmos_key(None,
        "The reference model becomes a copy of the current one every so many steps. Unset or 0: never.",
        acts="number: Weights of the reference model.", example=100)
    reset_optimizer_with_reference: bool = cosmos_key(True,
        "Whether the optimizer's state is reset together with the reference model.",
        acts="number: State of the optimizer after a reset.")
    balance_dp_token: bool = cosmos_key(False,
        "Whether samples are dealt to data-parallel ranks so that their token counts are balanced. It never changes "
        "the gradient.", acts="number: Rows of each rank.")
    use_decoupled_loss: bool = cosmos_key(False,
        "Clip against a proximal policy recomputed by the trainer, and weight by its ratio to the behaviour policy. "
        "False: clip against the behaviour policy itself.", acts=_LOSS)
    behav_imp_weight_cap: Positive | None = cosmos_key(None,
        "Tokens whose behaviour importance weight exceeds this cap get no loss.", acts=_LOSS, example=5.0)
    rollout_as_token_ids: bool = cosmos_key(False,
        "Samples always travel as token ids; false sends the decoded text along with them.",
        acts="request or reply: Whether a pushed sample carries its text.")

    @property
    def recomputes_old(self) -> bool:
        """Whether the trainer computes the log-probs of the old policy before its first optimizer step."""
        return self.use_decoupled_loss or self.rollout_correction.needs_old

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
    def has_baseline(self) -> bool:
        """Whether each group has one more sample, drawn greedily, whose score is the baseline of the others."""
        return self.advantage_estimator in ESTIMATORS and ESTIMATORS[self.advantage_estimator].greedy

    @property
    def prompt_column(self) -> str:
        """The prompt's column, with its default resolved."""
        return self.prompt_column_name or "prompt"


class SFTDataConfig(_DataloaderConfig):
    """Supervised fine-tuning on conversations."""

    type: Literal["sft"] = cosmos_key(..., "The algorithm: supervised fine-tuning.",
        acts="process: Which roles are started and what is trained.")
    conversation_column_name: NonEmptyStr = cosmos_key("conversations",
        "Column of the conversation: a list of {role, content} or its JSON text.", acts=_TOKENS)
    prompt_column_name: str = cosmos_key("",
        "Column of the question (text, or messages), in place of a conversation; with response_column_name.",
        acts="file: Tokens and `prompt` of a prepared row.", example="question")
    query_column_name: str = key("",
        "Column of a second text of the question, such as Alpaca's `input`: it follows the question on a line of its "
        "own, where it is not empty. With prompt_column_name. Empty: none.", acts=_TOKENS, example="input")
    response_column_name: str = cosmos_key("", "Column of the answer to learn, in place of a conversation.",
        acts="file: `answer` of a prepared row.", example="answer")
    balance_dp_token: bool = cosmos_key(True,
        "Whether samples are dealt to data-parallel ranks so that their token counts are balanced. It never changes "
        "the gradient.", acts="number: Rows of each rank.")

    @property
    def has_pairs(self) -> bool:
        """Whether rows are a prompt and a response instead of a conversation."""
        return bool(self.prompt_column_name and self.response_column_name)

    @property
    def columns(self) -> dict[str, str]:
        """The columns that are read of a row, by the keys that name them."""
        if not self.has_pairs:
            return {"conversation_column_name": self.conversation_column_name}
        names = ("prompt_column_name", "response_column_name", "query_column_name")
        return {name: column for name in names if (column := getattr(self, name))}


def _tag(value: Any) -> str:
    """The tag of a train policy as written; a table without `type` is grpo, the default."""
    tag = value.get("type", "grpo") if isinstance(value, dict) else getattr(value, "type", "grpo")
    return tag if isinstance(tag, str) else repr(tag)


TrainPolicy = Annotated[
    Annotated[GrpoConfig, Tag("grpo")] | Annotated[SFTDataConfig, Tag("sft")], Discriminator(_tag)
]
