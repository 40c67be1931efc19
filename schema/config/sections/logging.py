"""`[logging]`: where metrics go."""

from __future__ import annotations

from typing import Literal

from schema.config.base import Natural, NonEmptyStr, Section
from schema.config.key import cosmos_key, key

Tracker = Literal["console", "wandb", "tensorboard", "mlflow", "swanlab", "trackio"]


# fmt: off
class LoggingConfig(Section):
    """`[logging]`: where metrics go."""

    logger: list[Tracker] = cosmos_key(["console"],
        "Trackers that receive the metrics of each step and validation. What a tracker's library reads of the "
        "environment (WANDB_MODE, MLFLOW_TRACKING_URI, …) counts.", acts="process: Which trackers are fed.")
    tracker_python: str = key("",
        "Python of an environment of its own in which trackers run, for those whose requirements exclude ours; it "
        "needs numpy, pydantic and safetensors as well. Empty: the one that runs the launcher.",
        acts="process: The interpreter of the process that feeds trackers.", example="/opt/trackers/bin/python")
    project_name: NonEmptyStr = cosmos_key("cosmos_rl", "Project name for trackers.",
        acts="request or reply: `project` of the job's status and summary.")
    experiment_name: str | None = cosmos_key(None, "Short name of this run. Unset: the name of the output directory.",
        min_length=1, acts="request or reply: `name` of the job's status and summary.", example="first-try")
    sample_groups: Natural = key(2,
        "Groups of each step whose samples are kept as text, with the log-probs of their tokens, in `samples/` of "
        "the run. Failed samples, and those of a validation, are kept in any case.",
        acts="file: Records in `samples/step-*.jsonl`.")
    sample_bytes: Natural = key(1_000_000_000,
        "Bytes that `samples/` may take on disk; the oldest files go first, none takes more than a quarter.",
        acts="file: Which files of `samples/` are still there.")
    samples_dir: str = key("",
        "Directory for all answers, on the controller's machine. In it, below the id of the run, are "
        "`train/step-00000012.jsonl` with those of the groups that step 12 trained, a line each, and "
        "`validation/step-00000012.jsonl` with those of the validation of version 12. Relative paths are relative to "
        "the current directory. Empty: none.",
        acts="file: Answers in that directory.", example="answers")
    log_validation_samples: Natural = key(0,
        "Answers of each validation that trackers show in a table, evenly spread over its prompts. 0: none.",
        acts="metric: A table of answers in trackers.", example=8)
    log_training_samples: Natural = key(0,
        "Answers of each step that trackers show in a table, evenly spread over the groups that sample_groups keeps. "
        "0: none.", acts="metric: A table of answers in trackers.", example=4)
