"""`[train]`: optimizer, precision, checkpoints and length of the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import Dtype, NonEmptyStr, Section, SizeOrAll
from schema.config.optimizer import OptimizerKeys, PrecisionKeys
from schema.config.train_policy import GrpoConfig, TrainPolicy

Content = Literal["model", "optimizer", "extra"]


class CheckpointConfig(Section):
    """`[train.ckpt]`: when training is saved, in what form, and where it is uploaded."""

    enable_checkpoint: bool = Field(
        default=False, description="Whether checkpoints are saved during training."
    )
    save_freq: int = Field(default=20, ge=1, description="A checkpoint every so many training steps.")
    save_freq_in_epoch: int = Field(
        default=0, ge=0, description="A checkpoint every so many epochs; 0: by steps only."
    )
    save_mode: Literal["async", "sync"] = Field(
        default="async", description="`async` writes beside the training, `sync` lets training wait."
    )
    max_keep: SizeOrAll = Field(default=5, description="Checkpoints kept, newest first; -1: all.")
    export_safetensors: bool = Field(
        default=True,
        description="Whether each checkpoint carries a safetensors export (with config and tokenizer) that "
        "transformers loads.",
    )
    save_contents: list[Content] = Field(
        default=["model", "optimizer", "extra"],
        min_length=1,
        description="What a checkpoint holds: weights, optimizer state, and `extra` (schedule, random states, "
        "position in the data). The export for transformers is export_safetensors.",
    )
    load_contents: list[Content | Literal["hf_model"]] | None = Field(
        default=None,
        description="What is read on resume; `hf_model` takes the weights from the export. Unset: all that was "
        "saved.",
    )
    load_schedule: bool = Field(
        default=True,
        description="On resume: whether the learning-rate schedule is the checkpoint's (true) or the config's.",
    )
    delete_after_load: bool = Field(
        default=False, description="Whether a local checkpoint is deleted once it has been resumed from."
    )
    upload_hf: bool = Field(
        default=False, description="Whether the export is uploaded to the Hugging Face hub."
    )
    hf_repo_name: str = Field(default="Comos-Reason1", description="Repository on the hub for upload_hf.")
    upload_s3: bool | Literal["final", "all"] = Field(
        default=False, description="Upload to S3: false, `final` (the last checkpoint) or `all`."
    )
    s3_bucket: str | None = Field(default=None, description="Bucket for upload_s3.")
    s3_prefix: str = Field(default="outputs", description="Key prefix for upload_s3.")


class FP8Config(Section):
    """`[train.fp8]`: linear layers in 8-bit floating point."""

    enable_fp8: bool = Field(default=False, description="Whether linear layers compute in fp8.")
    fp8_recipe: Literal["dynamic_scaling", "delayed_scaling"] = Field(
        default="dynamic_scaling", description="How scales are found."
    )
    quant_recipe: Literal["rowwise", "tensorwise"] = Field(
        default="rowwise", description="Granularity of the scales."
    )


class FP4Config(Section):
    """`[train.fp4]`: linear layers in 4-bit floating point."""

    enable_fp4: bool = Field(default=False, description="Whether linear layers compute in fp4.")
    fp4_recipe: Literal["dynamic_scaling", "delayed_scaling"] = Field(
        default="dynamic_scaling", description="How scales are found."
    )
    quant_recipe: Literal["rowwise", "tensorwise"] = Field(
        default="rowwise", description="Granularity of the scales."
    )


class TrainingConfig(PrecisionKeys, OptimizerKeys):
    """`[train]`: optimizer, precision, checkpoints and length of the run."""

    train_policy: TrainPolicy = Field(default_factory=GrpoConfig, description="The algorithm and its data.")
    transfer_dtype: Dtype | None = Field(
        default=None, description="Type of the weights sent from policy to rollout. Unset: param_dtype."
    )
    train_batch_per_replica: int = Field(
        default=16,
        ge=1,
        description="Samples per training step of one policy replica. train_batch_per_replica * "
        "policy.parallelism.n_init_replicas / rollout.n_generation groups make a step and must be whole.",
    )
    fp8: FP8Config = Field(default_factory=FP8Config, description="fp8 training.")
    fp4: FP4Config = Field(default_factory=FP4Config, description="fp4 training.")
    ckpt: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints.")
    resume: bool | str = Field(
        default=False,
        description="true: resume from the newest complete checkpoint of output_dir; a path: from that "
        "checkpoint (relative to the current directory).",
    )
    epoch: int = Field(default=1, ge=1, description="Passes over the dataset.")
    output_dir: NonEmptyStr = Field(
        default="./outputs",
        description="Directory of logs, weights, checkpoints and exports, relative to the current directory.",
    )
    timestamp: str = Field(
        default="",
        pattern=r"^$|^[A-Za-z0-9][A-Za-z0-9._:-]*$",
        description="Name of the run's directory below output_dir. Empty: made from the time of start.",
    )
    async_tp_enabled: bool = Field(
        default=False, description="Whether tensor parallelism overlaps its communication."
    )
    sync_weight_interval: int = Field(
        default=1,
        ge=1,
        description="Weights are published every so many steps. Needs allowed_outdated_steps >= this - 1.",
    )
    deterministic: bool = Field(default=False, description="Deterministic kernels and a fixed seed; slower.")
    fa_version: int | None = Field(
        default=None, ge=2, le=4, description="FlashAttention version. Unset: the default."
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=2**32,
        description="Seed of the job: order of data, initialisation and, unless said otherwise, sampling. "
        "Unset: 42.",
    )
    local_dataset: bool | None = Field(
        default=True,
        description="Whether workers read rows themselves (true) or receive them with the lease.",
    )
    max_num_steps: int | None = Field(
        default=None,
        ge=1,
        description="Training ends after this many steps, or with `epoch`, whichever is first.",
    )
    sequence_packing: bool = Field(
        default=False,
        description="Whether the sequences of a micro-batch are packed into one row instead of padded. Same "
        "numbers.",
    )

    @property
    def effective_transfer_dtype(self) -> Dtype:
        """The type in which weights are published."""
        return self.transfer_dtype or self.param_dtype
