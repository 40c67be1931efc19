"""Training steps of TRL's GRPOTrainer on a given batch; `trainer.py` starts it in TRL's own environment.

    python benchmarks/trl/step_of_trl.py DIRECTORY THREADS

For each line of stdin it takes a step and prints [seconds, CPU seconds]. DIRECTORY holds a model (`policy`) and
`samples.json`: [{prompt, response, logprobs, advantage}], of which 16 in their order are a micro-batch. Nothing of
this project is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

MICRO_BATCH = 16


def padded(torch: Any, rows: list[list[Any]], *, left: bool) -> tuple[Any, Any]:
    """(values, mask), [N, L]."""
    width = max(map(len, rows))
    values, mask = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        values[number, place], mask[number, place] = torch.tensor(row, dtype=torch.float32), 1
    return values, mask


def main(directory: Path, threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    samples = json.loads((directory / "samples.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "a": 1, "<eos>": 2}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    trainer = GRPOTrainer(
        model=str(directory / "policy"),
        processing_class=tokenizer,
        reward_funcs=[lambda completions, **_: [0.0 for _ in completions]],
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(samples)),
        args=GRPOConfig(
            output_dir=str(directory / "out"),
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=len(samples) // MICRO_BATCH,
            num_generations=8,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            model_init_kwargs={"dtype": "float32"},
        ),
    )
    model, optimizer = trainer.model, trainer.create_optimizer()
    model.train()
    trainer.current_gradient_accumulation_steps = len(samples) // MICRO_BATCH

    def step() -> None:
        for start in range(0, len(samples), MICRO_BATCH):
            part = samples[start : start + MICRO_BATCH]
            prompts, prompt_mask = padded(torch, [sample["prompt"] for sample in part], left=True)
            responses, mask = padded(torch, [sample["response"] for sample in part], left=False)
            loss = trainer._compute_loss(
                model,
                {
                    "prompt_ids": prompts.long(),
                    "prompt_mask": prompt_mask,
                    "completion_ids": responses.long(),
                    "completion_mask": mask,
                    "old_per_token_logps": padded(torch, [s["logprobs"] for s in part], left=False)[0],
                    "advantages": torch.tensor([sample["advantage"] for sample in part]),
                    "num_items_in_batch": torch.tensor(sum(len(sample["response"]) for sample in samples)),
                },
            )
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    print("ready", flush=True)
    for _ in sys.stdin:
        began, spent = time.perf_counter(), time.process_time()
        step()
        print(json.dumps([time.perf_counter() - began, time.process_time() - spent]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
