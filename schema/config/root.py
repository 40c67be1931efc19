"""The whole configuration of a job, and the values that follow from several sections.

Config ─┬─ train ── train_policy (grpo | sft) ── dataset, overlong_reward, kl_in_reward, rollout_correction
        │         └ ckpt, fp8, fp4
        ├─ policy ─ parallelism, lora          ├─ reference, [[teacher]], critic, reward_model
        ├─ rollout ─ parallelism, sampling_config, multi_turn_config
        ├─ validation, evaluation, reward      ├─ controller, redis, weight_sync
        ├─ placement, autoscale, kubernetes    └─ launcher, logging, profiler, custom
"""

from __future__ import annotations

from typing import Any

from schema.config.base import Dtype, FreeTable, Section, short_names
from schema.config.key import cosmos_key, key
from schema.config.loading.tomlwrite import dumps
from schema.config.sections.autoscale import AutoscaleConfig
from schema.config.sections.controller import ControllerConfig
from schema.config.sections.critic import CriticConfig
from schema.config.sections.curriculum import CurriculumConfig
from schema.config.sections.dataset import CacheSettings
from schema.config.sections.evaluation import EvaluationConfig
from schema.config.sections.kubernetes import KubernetesConfig
from schema.config.sections.launcher import LauncherConfig
from schema.config.sections.logging import LoggingConfig
from schema.config.sections.placement import PlacementConfig
from schema.config.sections.policy import PolicyConfig
from schema.config.sections.profiler import ProfilerConfig
from schema.config.sections.redis import RedisConfig
from schema.config.sections.reference import ReferenceConfig
from schema.config.sections.reward import RewardConfig
from schema.config.sections.reward_model import RewardModelConfig
from schema.config.sections.rollout import RolloutConfig
from schema.config.sections.teacher import TeacherConfig
from schema.config.sections.train import TrainingConfig
from schema.config.sections.train_policy import GrpoConfig, SFTDataConfig
from schema.config.sections.validation import ValidationConfig
from schema.config.sections.weight_sync import WeightSyncConfig
from schema.storage.address import SCHEMES, is_remote

DEFAULT_SEED = 42


# fmt: off
class Config(Section):
    """A job: what `cosmos-launch --config run.toml` reads."""

    train: TrainingConfig = cosmos_key(TrainingConfig, "Training.")
    policy: PolicyConfig = cosmos_key(PolicyConfig, "The model that is trained.")
    rollout: RolloutConfig = cosmos_key(RolloutConfig, "Generation of answers.")
    reference: ReferenceConfig = key(ReferenceConfig, "The frozen model of the KL terms.")
    teacher: list[TeacherConfig] = key([], "Models that the policy is distilled from, one table each.")
    critic: CriticConfig = key(CriticConfig,
        "The value model.", only="grpo",
        inside={
            "model_revision": "refusal: A revision of a critic in a local directory, which has none.",
            "trust_remote_code": "file: Code that comes with the critic's model.",
        })
    reward_model: RewardModelConfig = key(RewardModelConfig, "A model that scores answers.", unbuilt="a reward model")
    validation: ValidationConfig = cosmos_key(ValidationConfig, "Scoring on held-out data.")
    evaluation: EvaluationConfig = key(EvaluationConfig, "Scoring answers that a file already holds.")
    reward: RewardConfig = key(RewardConfig, "How reward functions run.")
    controller: ControllerConfig = key(ControllerConfig, "The controller.")
    redis: RedisConfig = key(RedisConfig, "The store of the controller's state.")
    weight_sync: WeightSyncConfig = key(WeightSyncConfig, "How weights travel.")
    placement: PlacementConfig = key(PlacementConfig, "Which devices each role gets.")
    autoscale: AutoscaleConfig = key(AutoscaleConfig, "How many rollout replicas there are.")
    kubernetes: KubernetesConfig = key(KubernetesConfig, "The manifests of `--target kubernetes`.")
    launcher: LauncherConfig = key(LauncherConfig, "How processes are run.")
    logging: LoggingConfig = cosmos_key(LoggingConfig, "Where metrics go.")
    profiler: ProfilerConfig = cosmos_key(ProfilerConfig, "Traces of the workers, and kept batches.")
    custom: FreeTable = cosmos_key({}, "Your own keys, handed to every user hook as they are.",
        acts="request or reply: What reward functions get as `custom`.", example={"mine": 1})

    def model_post_init(self, context: Any) -> None:
        """Datasets of all sections keep copies of remote files in one cache."""
        policy = self.train.train_policy
        cache = CacheSettings(policy.dataset_cache_dir, policy.dataset_cache_size)
        for dataset in (policy.dataset, self.validation.dataset, self.evaluation.dataset):
            dataset.keep_in(cache)

    @property
    def is_evaluation(self) -> bool:
        """Whether the job scores answers of a file (`[evaluation]` names one) and trains nothing."""
        return self.evaluation.dataset.is_named

    @property
    def data_schemes(self) -> frozenset[str]:
        """The schemes of the addresses that data is read from (`schema.storage.address.SCHEMES`)."""
        datasets = (self.train.train_policy.dataset, self.validation.dataset, self.evaluation.dataset)
        parts = [part for dataset in datasets for _, part in dataset.parts]
        names = [name for part in parts for name in (part.name, *part.files) if is_remote(name)]
        return frozenset(SCHEMES[name.partition("://")[0].lower()] for name in names)

    @property
    def is_grpo(self) -> bool:
        """Whether the job learns by reinforcement (its steps train on generated answers)."""
        return isinstance(self.train.train_policy, GrpoConfig)

    @property
    def generates(self) -> bool:
        """Whether the job has rollout replicas: to learn from their answers, or to validate with them."""
        return self.is_grpo or (self.validation.enable and self.validation.generate)

    @property
    def grpo(self) -> GrpoConfig:
        """The GRPO section; raises TypeError for a supervised job."""
        policy = self.train.train_policy
        if not isinstance(policy, GrpoConfig):
            raise TypeError('train.train_policy.type is "sft": this job has no GRPO section')
        return policy

    @property
    def shares_time(self) -> bool:
        """Whether trainer and rollout replicas have the same devices in turns."""
        return self.is_grpo and self.placement.share == "time" and not self.validation.only

    @property
    def replays_routing(self) -> bool:
        """Whether the trainer sends tokens to the experts that the engine chose."""
        trains = self.is_grpo and not self.is_evaluation and not self.validation.only
        return trains and self.grpo.routing_replay != "none"

    @property
    def has_reference(self) -> bool:
        """Whether a KL term needs the reference model."""
        needed = self.is_grpo and (self.grpo.kl_beta > 0.0 or self.grpo.kl_in_reward.beta > 0.0)
        return needed and not self.validation.only

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained next to the policy."""
        return self.is_grpo and self.critic.enable and not self.validation.only

    @property
    def local_teachers(self) -> list[TeacherConfig]:
        """The teachers that a trainer loads."""
        return [teacher for teacher in self.teacher if teacher.is_local]

    @property
    def sft(self) -> SFTDataConfig:
        """The SFT section; raises TypeError for a GRPO job."""
        policy = self.train.train_policy
        if not isinstance(policy, SFTDataConfig):
            raise TypeError('train.train_policy.type is "grpo": this job has no SFT section')
        return policy

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part or domain of the training data, as they are written; empty: none has one."""
        policy = self.train.train_policy
        if self.validation.only:
            return {}
        return policy.dataset.shares or (dict(policy.domain_shares) if isinstance(policy, GrpoConfig) else {})

    @property
    def curriculum(self) -> CurriculumConfig:
        """Which prompts come when; of a job that trains nothing: all as usual."""
        return CurriculumConfig() if self.validation.only else self.train.train_policy.curriculum

    @property
    def staleness_bound(self) -> int:
        """S: the most steps by which a trained token may be older than the step. `on_policy` makes it 0."""
        policy = self.grpo
        return 0 if policy.on_policy else policy.allowed_outdated_steps

    @property
    def samples_per_step(self) -> int:
        """Samples of one training step over all policy replicas."""
        return self.train.train_batch_per_replica * self.policy.parallelism.n_init_replicas

    @property
    def groups_per_step(self) -> int:
        """B: groups of one training step (whole, the rules see to it)."""
        return self.samples_per_step // self.rollout.n_generation

    @property
    def group_size(self) -> int:
        """Samples of a group: those that are trained and, with an estimator that needs it, the greedy one."""
        return self.rollout.n_generation + (self.is_grpo and self.grpo.has_baseline)

    @property
    def sampling_temperature(self) -> float:
        """The temperature of training rollouts, wherever it was written.

        Two different written values are refused by the rules, so the one that differs from the default of 1.0
        is the written one. It is decided by values so that a configuration read back from JSON agrees.
        """
        trained = self.grpo.temperature if self.is_grpo else 1.0
        return trained if trained != 1.0 else self.rollout.sampling_config.temperature

    @property
    def effective_seed(self) -> int:
        """The seed of the job: `train.seed`, else 42, so that a run can always be repeated."""
        return DEFAULT_SEED if self.train.seed is None else self.train.seed

    @property
    def engine_seed(self) -> int:
        """The seed of the inference engine: `rollout.seed`, else the seed of the job."""
        return self.effective_seed if self.rollout.seed is None else self.rollout.seed

    @property
    def sampling_seed(self) -> int:
        """The base of per-sample seeds: `rollout.sampling_config.seed`, else the engine's seed."""
        seed = self.rollout.sampling_config.seed
        return self.engine_seed if seed is None else seed

    @property
    def engine_dtype(self) -> Dtype:
        """The type in which the inference engine computes."""
        dtype = self.rollout.dtype
        return self.train.effective_transfer_dtype if dtype == "auto" else dtype

    @property
    def engine_max_len(self) -> int:
        """The longest sequence of the inference engine in tokens."""
        return self.rollout.max_model_len or self.policy.model_max_length

    @property
    def longest_sequence(self) -> int:
        """Prompt and answer together in tokens: what the engine holds and training takes."""
        return min(self.engine_max_len, self.policy.model_max_length)

    @property
    def training_reward_weights(self) -> dict[str, float]:
        """Reward function -> weight of training; empty: a supervised job has none."""
        return self.grpo.reward_weights if self.is_grpo else {}

    @property
    def validation_rewards(self) -> dict[str, dict[str, float]]:
        """Reward function -> weight of each validation set, by its label: its own, else the training rewards."""
        training = self.training_reward_weights
        return {name: keys.reward_weights or training for name, keys in self.validation.sets.items()}

    @property
    def validation_reward_names(self) -> frozenset[str]:
        """The reward functions of all validation sets."""
        return frozenset().union(*self.validation_rewards.values())

    @property
    def reward_names(self) -> dict[str, str]:
        """Reward function -> what it is called everywhere, in training and validation alike."""
        if self.is_evaluation:
            return short_names(sorted(self.evaluation.reward_weights))
        if not self.generates:
            return {}
        return short_names(
            sorted({*self.training_reward_weights, *self.validation.reward_weights, *self.validation_reward_names})
        )

    def to_dict(self) -> dict[str, Any]:
        """The resolved configuration as JSON-compatible values, defaults included.

        Where one key stands in for another (`on_policy`, the two temperatures), both are written with the
        value that acts, so that reading it back gives the same job and meets no contradiction.
        """
        data = self.model_dump(mode="json")
        if self.is_grpo:
            data["train"]["train_policy"]["allowed_outdated_steps"] = self.staleness_bound
            data["train"]["train_policy"]["temperature"] = self.sampling_temperature
            data["rollout"]["sampling_config"]["temperature"] = self.sampling_temperature
        elif self.sft.has_pairs:
            del data["train"]["train_policy"]["conversation_column_name"]  # those two stand in for it
        return data

    def to_toml(self) -> str:
        """The resolved configuration as TOML; unset keys, which TOML cannot write, are left out."""
        return dumps(self.to_dict())
