"""Starter configurations: commented TOML for a chosen recipe, with values that fit the machine.

    recipe + Fit (GPUs, engine, model) ─▶ text

Every text is sound as it is: a test validates each recipe for machines of several sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from string import Template

REWARD_FILE = "reward.py"
REWARD = '''\
"""A reward of your own: {config} names it as { "{file}:score" = 1.0 }."""
import re


def score(completion: str, row: dict) -> float:
    # row has the columns of the data; row["answer"] is what response_column_name names, row["prompt"] the chat.
    expected = float(str(row["answer"]).rpartition("####")[2].replace(",", ""))
    numbers = re.findall(r"-?[0-9]+(?:\\.[0-9]+)?", completion.replace(",", ""))
    return float(list(map(float, numbers[-1:])) == [expected])  # an exception is an error by name, never a 0
'''
"""A reward function that suits the data of every recipe of reinforcement: the last number is the answer."""

BOXED = r"Reason step by step, and put the final answer in \boxed{}."
"""The system prompt of recipes whose reward is `boxed_math`: an answer that is not boxed is worth nothing."""

GPU_MODEL, CPU_MODEL = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-0.6B"


@dataclass(frozen=True, slots=True)
class Fit:
    """The machine that the text is for. engine: `vllm` or `transformers`. model: in place of the recipe's own.

    compiles: whether it has GPUs, and a compiler for their layers."""

    gpus: int
    engine: str
    model: str = ""
    compiles: bool = False

    @property
    def training_gpus(self) -> int:
        """GPUs of the trainer: the largest power of two that leaves as many for the rollouts."""
        half = self.gpus // 2
        return 1 << (half.bit_length() - 1) if half else 1

    @property
    def rollout_gpus(self) -> int:
        """GPUs of the rollout replicas, one each; a single GPU is shared."""
        return max(1, self.gpus - self.training_gpus)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One starter configuration.

    is_tiny: for the model of 0.33M parameters. makes_model: `init` makes that next to the file. needs_model: it
    goes on from a trained one.
    """

    name: str
    title: str
    note: str
    blocks: tuple[str, ...]
    values: dict[str, str]
    cpu_values: dict[str, str]
    supervised: bool = False
    is_tiny: bool = False
    makes_model: bool = False
    needs_model: bool = False

    def text(self, fit: Fit, file: str, model: str = "", longest: int | None = None) -> str:
        """The file's text. file: its name, for the commands in the comments. longest: positions of the model."""
        # Only vLLM has the key, and only a GPU needs it.
        share = {0: "", 1: "0.4"}.get(fit.gpus, "0.85") if fit.engine == "vllm" else ""
        values = {
            "title": self.title,
            "note": "\n".join(f"# {line}".rstrip() for line in self.note.splitlines()),
            "commands": commands(file, scores=not self.supervised),
            "reward": str(Path(file).with_name(REWARD_FILE)),
            "fit": self.words(fit),
            "system": BOXED,
            "shards": str(max(1, fit.gpus) if self.supervised else fit.training_gpus),
            "rollouts": str(fit.rollout_gpus if fit.gpus > 1 else 1),
            "engine": fit.engine,
            "model": model or fit.model or (GPU_MODEL if fit.gpus else CPU_MODEL),
            "dtype": "bfloat16" if fit.gpus else "float32",
            "compile": "true # faster layers, for minutes at the first step" if fit.compiles else "false",
            "dtype_note": "the optimizer's copy stays float32" if fit.gpus else "bfloat16 is slow without a GPU",
            "memory": (MEMORY.format(share) if share else "") + "\n",
            **self.values,
            **({} if fit.gpus else self.cpu_values),
        }
        if longest is not None and longest < int(values.get("max_length", 0)):
            limits = {"max_length": longest, "response": longest // 2, "buffer": longest // 8}
            values |= {key: str(min(int(values[key]), most)) for key, most in limits.items() if key in values}
        blocks = list(self.blocks)
        if fit.gpus == 1 and not self.supervised:
            blocks.append(SHARED)
        return "\n".join(Template(block).substitute(values) for block in blocks)

    def words(self, fit: Fit) -> str:
        """Name the machine that the text is written for."""
        if self.is_tiny:
            return "two CPU cores"
        gpus = {0: "no GPU", 1: "one GPU"}.get(fit.gpus, f"{fit.gpus} GPUs")
        return f"a machine with {gpus}" + ("" if self.supervised else f", rollouts by {fit.engine}")


def commands(file: str, scores: bool) -> str:
    """Return the commands to use the file with, as comments. scores: whether it has rewards."""
    rows = [
        (f"cosmos-launch validate {file}", "every mistake at once"),
        *([(f"cosmos-launch try-reward {file}", "what the rewards say of the first rows")] if scores else []),
        (f"cosmos-launch --config {file} --dry-run", "processes, commands, memory"),
        (f"cosmos-launch --config {file}", "train"),
        ("cosmos-launch explain train.optm_lr", "what a key does (keys left out have their defaults)"),
    ]
    size = max(len(command) for command, _ in rows) + 3
    return "\n".join(f"#   {command:<{size}}{words}" for command, words in rows)


# ---- blocks: `$name` stands for a value ----------------------------------------------------------------------

HEAD = """\
#:schema ./config.schema.json
# $title
$note
#
$commands
#
# Written for $fit.
"""

POLICY = """\
[policy]
model_name_or_path = "$model" # a directory, or a name on the Hugging Face hub
model_max_length = $max_length # prompt and answer in tokens; longer samples are dropped and counted
model_gradient_checkpointing = $checkpointing

[policy.parallelism]
tp_size = 1
dp_shard_size = $shards # ranks (GPUs) that share the model, its gradients and its optimizer
"""

ROLLOUT = """\
[rollout]
backend = "$engine" # vllm, or transformers for machines without it
n_generation = $group # answers to one prompt: a group
max_response_length = $response
batch_size = $lease # groups per request of a replica
max_concurrent_samples = $concurrent # answers in the making in one replica
$memory[rollout.parallelism]
tp_size = 1 # GPUs of one replica
n_init_replicas = $rollouts
"""

MEMORY = """\
gpu_memory_utilization = {} # share of the GPU that vLLM takes
enforce_eager = false # CUDA graphs: half a minute at the start, and faster answers
"""

SHARED = """\
[placement]
share = "memory" # trainer and rollouts on one GPU, both resident: mind rollout.gpu_memory_utilization
"""

TRAIN = """\
[train]
output_dir = "outputs"
epoch = $epochs
train_batch_per_replica = $batch # $batch_words
optm_lr = $lr
optm_warmup_steps = $warmup
param_dtype = "$dtype" # $dtype_note
sequence_packing = true # no padding, the same numbers
compile = $compile
"""

CHECKPOINTS = """\
[train.ckpt]
enable_checkpoint = true # a trainer that dies goes on from the newest
save_mode = "sync"
save_freq = $save_freq
max_keep = 2
"""

NO_EXPORT = "export_safetensors = false # the trained model is exported at the end\n"

GRPO = """\
[train.train_policy]
type = "grpo"
prompt_column_name = "question" # a text, or a list of {role, content}
system_prompt = '$system' # asks for what the reward checks
response_column_name = "answer" # what the reward functions compare with
reward_function = { boxed_math = 1.0 } # or your own: { "$reward:score" = 1.0 }
allowed_outdated_steps = $stale # no token is trained on that is older; 0: on-policy
max_token_len_per_mini_batch = $tokens # memory of a micro-batch; never changes the gradient
"""

DATA = """\
[train.train_policy.dataset]
name = "openai/gsm8k" # or your own parquet or jsonl file
subset = "main"
split = "train"

[validation]
enable = true
freq = 20 # steps
temperature = 1.0
top_k = -1

[validation.dataset]
name = "openai/gsm8k"
subset = "main"
split = "test"
"""

DAPO = """\
variant = "dapo"
epsilon_low = 0.2
epsilon_high = 0.28 # clip-higher: unlikely tokens may rise further
loss_type = "token-mean"
filter_reward_metric = ["boxed_math"] # dynamic sampling: groups that are all right or all wrong are replaced

[train.train_policy.overlong_reward]
enable_overlong_penalty = true
buffer_length = $buffer # the penalty begins this many tokens before max_response_length
penalty_factor = 1.0
"""

OVERSAMPLE = """\
[controller]
oversample = 1.5 # groups in the making per group needed, since some will be filtered out
"""

GSPO = """\
variant = "gspo" # one ratio per answer: steadier on long answers
epsilon_low = 3e-4
epsilon_high = 4e-4
loss_type = "seq-mean-token-mean"
batch_size_per_optimize = $piece # four optimizer steps per batch
"""

SFT = """\
[train.train_policy]
type = "sft"
conversation_column_name = "messages" # a list of {role, content}
max_token_len_per_mini_batch = $tokens # memory of a micro-batch; never changes the gradient

[train.train_policy.dataset]
name = "HuggingFaceTB/smoltalk" # or your own parquet or jsonl file
subset = "everyday-conversations"
split = "train"
"""

DECAY = """\
0.03 # a float is a share of all steps
optm_decay_type = "cosine"
optm_decay_ratio = 0.97
optm_min_lr_factor = 0.1"""
"""The warm-up, and what follows it."""

TINY_POLICY = """\
[policy]
model_name_or_path = "$model"
model_max_length = 256
model_gradient_checkpointing = false # 0.3M parameters: nothing to save

[policy.parallelism]
tp_size = 1
"""

TINY_SFT = """\
[train]
output_dir = "outputs/addition"
max_num_steps = 1800
train_batch_per_replica = 16
param_dtype = "float32"
compile = false
optm_lr = 2e-3
optm_betas = [0.9, 0.98]
optm_warmup_steps = 20
optm_decay_type = "linear"
optm_decay_ratio = 0.4
"""

TINY_SFT_DATA = """\
[train.train_policy]
type = "sft"
conversation_column_name = "conversations"
mini_batch = 16

[train.train_policy.dataset]
name = "synthetic:addition" # made on the spot
options = { n = 28800, digits = 3, phrasings = 4, demonstrations = true }

[launcher]
cpu_threads = 1 # this model is too small for more
"""

TINY_GRPO = """\
[rollout]
backend = "transformers" # the embedded engine: no vLLM needed
n_generation = 8 # answers to one question: a group
batch_size = 16 # groups per request of a replica
max_response_length = 44
max_concurrent_samples = 128

[rollout.parallelism]
tp_size = 1

[train]
output_dir = "outputs/addition"
max_num_steps = 100
train_batch_per_replica = 128 # 16 groups of 8
param_dtype = "float32"
compile = false
optm_lr = 3e-4
optm_betas = [0.9, 0.95]
optm_warmup_steps = 5
"""

TINY_GRPO_DATA = """\
[train.train_policy]
type = "grpo"
prompt_column_name = "prompt"
response_column_name = "answer"
reward_function = { boxed_math = 1.0, format = 0.2 } # or your own: { "$reward:score" = 1.0 }
allowed_outdated_steps = 2 # no token is trained on that is older
epsilon_high = 0.28
mini_batch = 32

[train.train_policy.dataset]
name = "synthetic:addition"
options = { n = 2000, digits = 3, phrasings = 4 }

[validation]
enable = true
freq = 20
batch_size = 128
temperature = 1.0
top_k = -1
reward_function = { boxed_math = 1.0 }

[validation.dataset]
name = "synthetic:addition" # sums that are never in the training data
options = { n = 200, digits = 3, phrasings = 4, seed = 7 }

[launcher]
cpu_threads = 1 # this model is too small for more
"""

# ---- values and recipes -----------------------------------------------------------------------------------

_SMALL = "samples of a step: 4 groups of 4: small, for the sake of the CPU"
_SHORT = {
    "max_length": "3072", "response": "2048", "checkpointing": "true", "group": "16", "lease": "8",
    "concurrent": "256", "batch": "256", "batch_words": "samples of a step: 16 groups of 16", "lr": "1e-6",
    "warmup": "10", "epochs": "1", "stale": "2", "tokens": "16384", "save_freq": "20",
}  # fmt: skip
_SHORT_CPU = {
    "max_length": "768", "response": "256", "group": "4", "lease": "2", "concurrent": "16", "batch": "16",
    "batch_words": _SMALL, "tokens": "1536",
}  # fmt: skip
_LONG = {
    "max_length": "18432", "response": "16384", "checkpointing": "true", "group": "16", "lease": "4",
    "concurrent": "128", "batch": "512", "batch_words": "samples of a step: 32 groups of 16", "lr": "1e-6",
    "warmup": "10", "epochs": "1", "stale": "2", "tokens": "18432", "save_freq": "20", "piece": "128",
}  # fmt: skip
_LONG_CPU = {
    "max_length": "2048", "response": "1024", "group": "4", "lease": "2", "concurrent": "16", "batch": "16",
    "batch_words": _SMALL, "tokens": "2048", "piece": "4",
}  # fmt: skip

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "grpo",
            "Reinforcement learning on checkable answers with GRPO (arXiv 2402.03300).",
            "The place to start: grade-school mathematics, the reward is a right \\boxed{} answer.",
            (HEAD, POLICY, ROLLOUT, TRAIN, CHECKPOINTS, GRPO, DATA),
            _SHORT,
            _SHORT_CPU,
        ),
        Recipe(
            "dapo",
            "Reinforcement learning with DAPO (arXiv 2503.14476).",
            "Clip-higher, token-level loss, dynamic sampling, a soft penalty on answers that run out of room.",
            (HEAD, POLICY, ROLLOUT, TRAIN, CHECKPOINTS, GRPO + DAPO, DATA, OVERSAMPLE),
            {**_SHORT, "buffer": "512"},
            {**_SHORT_CPU, "buffer": "64"},
        ),
        Recipe(
            "gspo",
            "Reinforcement learning on long answers with GSPO (arXiv 2507.18071).",
            "Ratios of whole answers, up to 16k tokens, several optimizer steps per batch.",
            (HEAD, POLICY, ROLLOUT, TRAIN, CHECKPOINTS, GRPO + GSPO, DATA),
            _LONG,
            _LONG_CPU,
        ),
        Recipe(
            "sft",
            "Supervised fine-tuning on conversations.",
            "Only the assistant's turns are learned.",
            (HEAD, POLICY, TRAIN, CHECKPOINTS, SFT),
            {
                **_SHORT, "max_length": "4096", "lr": "1e-5", "warmup": DECAY, "batch": "64", "save_freq": "100",
                "batch_words": "conversations of a step",
            },
            {"max_length": "1024", "batch": "8", "tokens": "2048"},
            supervised=True,
        ),
        Recipe(
            "addition-sft",
            "A small model learns to add, without a GPU, in two minutes on two cores. Part one: imitation.",
            "A model of 0.33M random parameters (made next to this file) imitates a sloppy demonstrator. It ends\n"
            "with about a third of the sums right. Part two: cosmos-launch init addition-grpo -o grpo.toml",
            (HEAD, TINY_POLICY, TINY_SFT, CHECKPOINTS + NO_EXPORT, TINY_SFT_DATA),
            {"save_freq": "200"},
            {},
            supervised=True,
            is_tiny=True,
            makes_model=True,
        ),
        Recipe(
            "addition-grpo",
            "A small model learns to add, without a GPU, in two minutes on two cores. Part two: reinforcement.",
            "Right answers are rewarded, and so is the format. The model stops blurting, reasons column by column\n"
            "and learns to carry: about 95 % of the sums it has never seen.",
            (HEAD, TINY_POLICY, TINY_GRPO, CHECKPOINTS + NO_EXPORT, TINY_GRPO_DATA),
            {"save_freq": "20"},
            {},
            is_tiny=True,
            needs_model=True,
        ),
    )
}  # fmt: skip
