"""One run of TRL's GRPOTrainer on the quickstart's task; `end_to_end.py` starts it in TRL's own environment.

    python benchmarks/trl/job_of_trl.py JOB.json     ->  last line of stdout: JSON {samples_s, reward, seconds, steps}

The job names a model directory, a JSONL file of prompts and references, and the batch. Speed is that of the
steady state: samples trained between the end of the first and of the last step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["threads"])
    sys.path.append(job["repository"])
    rewards, weights = reward_functions(job["rewards"])
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    dataset = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    )
    ends: list[float] = []

    class Clock(TrainerCallback):
        """Notes the end of each step."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.monotonic())

    samples = job["groups"] * job["n_generation"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        reward_funcs=rewards,
        train_dataset=dataset,
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=job["output_dir"],
            per_device_train_batch_size=samples,
            steps_per_generation=1,
            num_generations=job["n_generation"],
            max_completion_length=job["max_response_length"],
            max_steps=job["steps"],
            learning_rate=job["lr"],
            adam_beta2=job["betas"][1],
            warmup_steps=job["warmup_steps"],
            lr_scheduler_type="constant_with_warmup",
            weight_decay=0.01,
            max_grad_norm=1.0,
            epsilon=job["epsilon_low"],
            epsilon_high=job["epsilon_high"],
            loss_type="dapo",  # the mean over all tokens of the batch, as ours
            temperature=1.0,
            beta=0.0,
            reward_weights=weights,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            seed=job["seed"],
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    means = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    result = {
        "samples_s": (len(ends) - 1) * samples / (ends[-1] - ends[0]),
        "reward": means[-1],
        "seconds": ends[-1] - ends[0],
        "steps": len(ends),
    }
    print(json.dumps(result), flush=True)


def reward_functions(weights: dict[str, float]) -> tuple[list[Any], list[float]]:
    """Our own reward functions behind TRL's signature, so that both trainers learn from the same numbers."""
    from rollout_worker.rewards.functions import BUILTIN

    def wrap(name: str) -> Any:
        function = BUILTIN[name]

        def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
            return [
                function(completion[0]["content"], {"answer": reference})
                for completion, reference in zip(completions, answer, strict=True)
            ]

        reward.__name__ = name
        return reward

    return [wrap(name) for name in weights], list(weights.values())


if __name__ == "__main__":
    main()
