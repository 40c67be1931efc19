"""The blocks of which `launcher.commands.recipes` puts starter configurations together; `$name` stands for a
value."""

from __future__ import annotations

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

MEMORY = "gpu_memory_utilization = {} # share of the GPU that vLLM takes\n"

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
compile = false
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
response_column_name = "answer" # what the reward functions compare with
reward_function = { boxed_math = 1.0 } # or your own: { "my/reward.py:score" = 1.0 }
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
max_num_steps = 1200
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
options = { n = 19200, digits = 3, phrasings = 4, demonstrations = true }

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
reward_function = { boxed_math = 1.0, format = 0.2 }
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
