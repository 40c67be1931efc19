"""`[train]`: optimizer, precision, checkpoints and length of the run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schema.config.base import MOST_SAMPLES, Dtype, NonEmptyStr, Section, SizeOrAll
from schema.config.sections.optimizer import OptimizerKeys, PrecisionKeys
from schema.config.sections.train_policy import GrpoConfig, TrainPolicy

Content = Literal["model", "optimizer", "extra"]


class CheckpointConfig(Section):
    """`[train.ckpt]`: when training is saved, in what form, and where it is uploaded."""

    enable_checkpoint: bool = Field(
        default=False, description="Whether checkpoints are saved during training."
    )
    save_freq: int = Field(default=20, ge=1, description="A checkpoint every so many training steps.")
    save_freq_in_epoch: int = Field(
        default=0,
        ge=0,
        description="Besides save_freq, a checkpoint each time that so many epochs are complete: every row of them "
        "trained or dropped. 0: by steps only.",
    )
    save_mode: Literal["async", "sync"] = Field(
        default="async",
        description="`async` copies the state to host memory and writes beside the training (the copy stays: as much "
        "memory as this rank's share of weights and optimizer); `sync` lets training wait until all is on disk.",
    )
    max_keep: SizeOrAll = Field(
        default=5,
        description="Checkpoints kept: the newest, the best validated one, then the newest others; -1: all.",
    )
    export_safetensors: bool = Field(
        default=True,
        description="Whether each checkpoint carries a safetensors export (with config and tokenizer) that "
        "transformers loads.",
    )
    save_contents: list[Content] = Field(
        default=["model", "optimizer", "extra"],
        min_length=1,
        description="What a checkpoint holds: weights, optimizer state, and `extra` (schedule, random states of "
        "every rank, position in the data). The export for transformers is export_safetensors; without `model` it is "
        "what the weights are resumed from, in its type. A run that dies goes on from what is held here.",
    )
    load_contents: list[Content | Literal["hf_model"]] | None = Field(
        default=None,
        description="What is read of the checkpoint that train.resume names; `hf_model` takes the weights from the "
        "export. Without `extra` the run begins its own data, schedule and step count at 0 with these weights. "
        "Unset: all that was saved. A run that continues itself reads all.",
    )
    load_schedule: bool = Field(
        default=True,
        description="On resume: whether the learning-rate schedule, with its peak optm_lr and its total steps, is "
        "the checkpoint's (true) or the config's. What differs is shown.",
    )
    delete_after_load: bool = Field(
        default=False,
        description="Whether the checkpoint that was resumed from is deleted, as soon as the next one is complete.",
    )
    upload_hf: bool = Field(
        default=False,
        description="Whether the export of each checkpoint and the final model go to the Hugging Face hub, a commit "
        "each. Token and endpoint come from HF_TOKEN and HF_ENDPOINT; a repository that does not exist is made, "
        "private.",
    )
    hf_repo_name: str = Field(
        default="Comos-Reason1", description="Repository on the hub for upload_hf, `owner/name`."
    )
    upload_s3: bool | Literal["final", "all"] = Field(
        default=False,
        description="Upload to S3: false, `final` (the model at the end) or `all` (or true: each checkpoint, too). "
        "Credentials and endpoint come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and the like. "
        "Training never waits; if the final upload fails, the job ends with an error and --resume tries again.",
    )
    s3_bucket: str | None = Field(default=None, description="Bucket for upload_s3.")
    s3_prefix: str = Field(
        default="outputs",
        description="What keys of upload_s3 begin with: `<prefix>/<run>/<step-… or final>/<file>`; complete.json is "
        "written last.",
    )


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
        le=MOST_SAMPLES,
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
    deterministic: bool = Field(
        default=False,
        description="Deterministic kernels, and the embedded engine decodes each group by itself (several times "
        "slower). A run that was killed and resumed then ends with the same bits as one that was not, if it is "
        "on-policy (allowed_outdated_steps = 0) or supervised, has one policy replica, generates with "
        "rollout.backend = transformers and stays on one kind of machine. Elsewhere only ledger and counters "
        "agree, and a warning says why.",
    )
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
