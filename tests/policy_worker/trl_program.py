"""TRL's own loss of given samples, and its gradient: `.venv-trl/bin/python trl_program.py DIRECTORY`.

DIRECTORY holds `policy` and `reference` (models), `samples.json` ([{prompt, response, logprobs, advantage}]) and
`cases.json` (a list of arguments of TRL's GRPOConfig). Writes `loss.json` and, for each case, `<number>.safetensors`.
Nothing of this project is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer


def padded(rows: list[list[Any]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, mask), [N, L]."""
    width = max(map(len, rows))
    values, mask = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.int64)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        values[number, place], mask[number, place] = torch.tensor(row, dtype=torch.float32), 1
    return values, mask


def inputs_of(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    prompts, prompt_mask = padded([sample["prompt"] for sample in samples], left=True)
    responses, mask = padded([sample["response"] for sample in samples], left=False)
    logprobs, _ = padded([sample["logprobs"] for sample in samples], left=False)
    return {
        "prompt_ids": prompts.long(),
        "prompt_mask": prompt_mask,
        "completion_ids": responses.long(),
        "completion_mask": mask,
        "old_per_token_logps": logprobs,
        "advantages": torch.tensor([sample["advantage"] for sample in samples]),
        "num_items_in_batch": mask.sum(),
    }


@torch.no_grad()
def logprobs_of(model: Path, samples: list[dict[str, Any]]) -> torch.Tensor:
    """Of each response token under a model, [N, L]."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for sample in samples:
        ids, cut = torch.tensor([*sample["prompt"], *sample["response"]]), len(sample["prompt"])
        logprobs = torch.log_softmax(lm(ids[None]).logits[0, cut - 1 : -1], 1)
        found.append(logprobs.gather(1, ids[cut:, None])[:, 0].tolist())
    return padded(found, left=False)[0]


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    samples = json.loads((directory / "samples.json").read_text())
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "a": 1, "<eos>": 2}, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    losses = []
    for number, case in enumerate(json.loads((directory / "cases.json").read_text())):
        trainer = GRPOTrainer(
            model=str(directory / "policy"),
            processing_class=tokenizer,
            reward_funcs=[lambda completions, **_: [0.0 for _ in completions]],
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
            args=GRPOConfig(
                output_dir=str(directory / "out"),
                per_device_train_batch_size=len(samples),
                num_generations=4,
                steps_per_generation=1,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                report_to="none",
                model_init_kwargs={"dtype": "float32"},
                **case,
            ),
        )
        inputs, model = inputs_of(samples), trainer.model
        if trainer.beta:
            inputs["ref_per_token_logps"] = logprobs_of(directory / "reference", samples)
        model.train()
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        save_file(gradients, directory / f"{number}.safetensors")
    (directory / "loss.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
