"""`[train]`: optimizer, precision, checkpoints and length of the run."""

from __future__ import annotations

from typing import Literal

from schema.config.base import BetaFloat, Count, Dtype, Natural, NonEmptyStr, Samples, Section, Seed, SizeOrAll
from schema.config.key import Deviation, cosmos_key, key
from schema.config.sections.optimizer import OptimizerKeys, PrecisionKeys
from schema.config.sections.train_policy import GrpoConfig, TrainPolicy

Content = Literal["model", "optimizer", "extra"]


# fmt: off
class CheckpointConfig(Section):
    """`[train.ckpt]`: when training is saved, in what form, and where it is uploaded."""

    enable_checkpoint: bool = cosmos_key(False, "Whether checkpoints are saved during training.",
        acts="file: Whether checkpoints are written.")
    save_freq: Count = cosmos_key(20, "A checkpoint every so many training steps.",
        acts="file: After which steps checkpoints are written.")
    save_freq_in_epoch: Natural = cosmos_key(0,
        "Besides save_freq, a checkpoint each time that so many epochs are complete: every row of them trained or "
        "dropped. 0: by steps only.", acts="file: After which epochs checkpoints are written.")
    save_mode: Literal["async", "sync"] = cosmos_key("async",
        "`async` copies the state to host memory and writes while training goes on (the copy stays: as much memory "
        "as this rank's share of weights and optimizer); `sync` lets training wait until all is on disk.",
        acts="process: The thread that writes a checkpoint.")
    max_keep: SizeOrAll = cosmos_key(5,
        "Checkpoints kept: the newest, the best validated one, then the newest others; -1: all.",
        acts="file: How many checkpoints stay.")
    export_safetensors: bool = cosmos_key(True,
        "Whether each checkpoint carries a safetensors export (with config and tokenizer) that transformers loads.",
        acts="file: `export` in each checkpoint.")
    save_contents: list[Content] = key(["model", "optimizer", "extra"],
        "What a checkpoint holds: weights, optimizer state, and `extra` (schedule, random states of every rank, "
        "position in the data). The export for transformers is export_safetensors; without `model` it is what the "
        "weights are resumed from, in its type. A run that dies goes on from what is held here.", min_length=1,
        acts="file: Files of a checkpoint.")
    load_contents: list[Content | Literal["hf_model"]] | None = key(None,
        "What is read of the checkpoint that train.resume names; `hf_model` takes the weights from the export. "
        "Without `extra` the run begins its own data, schedule and step count at 0 with these weights. Unset: all "
        "that was saved. A run that continues itself reads all.",
        acts="number: What is read of a checkpoint, and the step that follows.", example=["model", "optimizer"])
    load_schedule: bool = key(True,
        "On resume: whether the learning-rate schedule, with its peak optm_lr and its total steps, is the "
        "checkpoint's (true) or the config's. What differs is shown.", acts="number: Learning rates after a resume.")
    delete_after_load: bool = key(False,
        "Whether the checkpoint that was resumed from is deleted, as soon as the next one is complete.",
        acts="file: Whether the checkpoint that was resumed from stays.")
    upload_hf: bool = cosmos_key(False,
        "Whether the export of each checkpoint and the final model go to the Hugging Face hub, a commit each. Token "
        "and endpoint come from HF_TOKEN and HF_ENDPOINT; a repository that does not exist is made, private.",
        acts="file: Whether exports are committed to the hub.")
    hf_repo_name: str = cosmos_key("Comos-Reason1", "Repository on the hub for upload_hf, `owner/name`.",
        acts="file: Repository that exports are committed to.")
    upload_s3: bool | Literal["final", "all"] = cosmos_key(False,
        "Upload to S3: false, `final` (the model at the end) or `all` (or true: each checkpoint, too). Credentials "
        "and endpoint come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and the like. Training "
        "never waits; if the final upload fails, the job ends with an error and --resume tries again.",
        acts="file: What is uploaded to the bucket.")
    s3_bucket: str | None = cosmos_key(None, "Bucket for upload_s3.",
        acts="file: Bucket that checkpoints are uploaded to.", example="my-bucket")
    s3_prefix: str = cosmos_key(
        "outputs",
        "What keys of upload_s3 begin with: `<prefix>/<run>/<step-… or final>/<file>`; complete.json is "
        "written last.",
        acts="file: Keys of what is uploaded.",
    )


_FP4 = "refusal: training in fp4, which no library offers for batches of any length."


class FP8Config(Section):
    """`[train.fp8]`: linear layers of the policy in 8-bit floating point."""

    enable_fp8: bool = cosmos_key(False,
        "Whether linear layers of the policy's decoder layers compute in fp8 (package torchao, GPUs from Ada on). "
        "Weights stay in master_dtype; published and reference weights are not in fp8.",
        acts="number: How many linear layers compute in fp8.")
    fp8_recipe: Literal["dynamic_scaling", "delayed_scaling"] = cosmos_key("dynamic_scaling",
        "How scales are found: at each product. `delayed_scaling` is refused: torchao has given it up.",
        acts="refusal: scales of earlier steps.")
    quant_recipe: Literal["rowwise", "tensorwise"] = cosmos_key("rowwise",
        "Granularity of the scales: one for each row, or for each tensor.", acts="number: Outputs of the layers.")


class FP4Config(Section):
    """`[train.fp4]`: refused. Linear layers in 4-bit floating point."""

    enable_fp4: bool = cosmos_key(False,
        "Must be false: torchao's training in fp4 is a prototype for multiples of 128 tokens.", acts=_FP4)
    fp4_recipe: Literal["dynamic_scaling", "delayed_scaling"] = cosmos_key("dynamic_scaling",
        "Must be left as it is.", acts=_FP4)
    quant_recipe: Literal["rowwise", "tensorwise"] = cosmos_key("rowwise", "Must be left as it is.", acts=_FP4)


class TrainingConfig(PrecisionKeys, OptimizerKeys):
    """`[train]`: optimizer, precision, checkpoints and length of the run."""

    train_policy: TrainPolicy = cosmos_key(GrpoConfig, "The algorithm and its data.")
    transfer_dtype: Dtype | None = cosmos_key(None,
        "Type of the weights sent from policy to rollout. Unset: param_dtype.",
        acts="file: Type of the tensors that are published and exported.", example="bfloat16",
        deviation=Deviation("None",
            "Their default is printed as the text None; ours is unset and means param_dtype, so that the rollout "
            "engine gets exactly the weights that the trainer computes with."))
    ema_decay: BetaFloat | None = key(None,
        "Decay of a moving average of the policy's weights, kept in float32 and updated after each optimizer step. "
        "It is exported to final_ema and kept in checkpoints; nothing generates from it. Unset: there is none.",
        acts="file: `final_ema`, an export of the averaged weights.", example=0.999)
    train_batch_per_replica: Samples = cosmos_key(16,
        "Samples per training step of one policy replica. train_batch_per_replica * "
        "policy.parallelism.n_init_replicas / rollout.n_generation groups make a step and must be whole.",
        acts="request or reply: Groups of a step; rows of a supervised step.",
        deviation=Deviation(8,
            "A step takes whole groups: with the default of 16 samples per group a batch of 8 can never be one."))
    fp8: FP8Config = cosmos_key(FP8Config, "fp8 training.")
    fp4: FP4Config = cosmos_key(FP4Config, "fp4 training.")
    ckpt: CheckpointConfig = cosmos_key(CheckpointConfig, "Checkpoints.")
    resume: bool | str = cosmos_key(False,
        "true: resume from the newest complete checkpoint of output_dir; a path: from that checkpoint (relative to "
        "the current directory).", acts="file: Checkpoint from which training goes on.")
    epoch: Count = cosmos_key(1, "Passes over the dataset.", acts="request or reply: Steps of the job.")
    output_dir: NonEmptyStr = cosmos_key("./outputs",
        "Directory of logs, weights, checkpoints and exports, relative to the current directory.",
        acts="file: Where the run's directory is.")
    timestamp: str = cosmos_key("",
        "Name of the run's directory below output_dir. Empty: made from the time of start.",
        pattern=r"^$|^[A-Za-z0-9][A-Za-z0-9._:-]*$", acts="file: Name of the run's directory.", example="my-run")
    async_tp_enabled: bool = cosmos_key(False,
        "Must be false: a compiler overlaps products with collectives of DTensor, and tensor parallelism here has "
        "exchanges of its own.", acts="refusal: true.")
    sync_weight_interval: Count = cosmos_key(1,
        "Weights are published every so many steps. Needs allowed_outdated_steps >= this - 1.",
        acts="request or reply: After which commits weights are published.")
    deterministic: bool = cosmos_key(False,
        "Deterministic kernels, and the embedded engine decodes each group by itself (several times slower). A run "
        "that was killed and resumed then ends with the same bits as one that was not, if it is on-policy "
        "(allowed_outdated_steps = 0) or supervised, has the same n_init_replicas, generates with rollout.backend = "
        "transformers and stays on one kind of machine. Elsewhere only ledger and counters agree, and a warning says "
        "why.", acts="number: Whether torch uses deterministic kernels, and each group is decoded by itself.")
    fa_version: int | None = cosmos_key(None,
        "FlashAttention version that computes the attention of training, on GPUs: 2 (package flash-attn), 3 "
        "(from its sources, Hopper) or 4 (flash-attn-4, from Hopper on). Unset: torch's own kernels.", ge=2, le=4,
        example=3, acts="number: Which kernel computes the attention.")
    seed: Seed | None = cosmos_key(None,
        "Seed of the job: order of data, initialisation and, unless said otherwise, sampling. Unset: 42.",
        acts="request or reply: Order of the rows, initial random state and seeds of samples.", example=42)
    local_dataset: bool | None = cosmos_key(True,
        "Whether rollout replicas read prepared rows in the run directory themselves, where they can open the file "
        "and its hash is right, or receive them with each lease (false). Unset: true. The rows are the same.",
        acts="request or reply: What is sent with a lease.")
    max_num_steps: Count | None = cosmos_key(None,
        "Training ends after this many steps, or with `epoch`, whichever is first.",
        acts="request or reply: Steps of the job.", example=500)
    sequence_packing: bool = cosmos_key(False,
        "Whether the sequences of a micro-batch are packed into one row instead of padded. Same numbers.",
        acts="number: Shape of a micro-batch.")
    metrics_of_all_samples: bool = key(False,
        "Whether samples that cannot change the gradient (their advantage is zero, and no other term of the loss "
        "reads them) are computed all the same. False: they are left out, and entropy, clip_fraction, behaviour_kl "
        "and mismatch are of the others; computed_fraction says how many those are.",
        acts="metric: `computed_fraction` of a step.")

    @property
    def effective_transfer_dtype(self) -> Dtype:
        """The type in which weights are published."""
        return self.transfer_dtype or self.param_dtype
