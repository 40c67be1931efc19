"""Load the exported models with transformers, as anybody would, and ask them sums that they were never shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schema.wire.prompts import PromptFile

QUESTIONS = 3
MAX_NEW_TOKENS = 44


@dataclass(frozen=True)
class Answer:
    """One held-out question with the greedy answers before and after reinforcement."""

    question: str
    reference: str
    before: str
    after: str

    @property
    def is_right(self) -> bool:
        return boxed(self.after, self.reference)


@dataclass(frozen=True)
class Comparison:
    base_accuracy: float
    """Share of held-out questions that the untrained model answers, sampled at temperature 1."""
    answers: list[Answer]


def boxed(text: str, reference: str) -> bool:
    """Whether an answer puts the reference into its last box."""
    _, opened, rest = text.rpartition("\\boxed{")
    inside, closed, _ = rest.partition("}")
    return bool(opened and closed) and inside == reference


def compare(base: Path, warm: Path, trained: Path, grpo_run: Path) -> Comparison:
    """Ask the three models held-out questions of a GRPO run."""
    file = PromptFile(grpo_run / "data" / "validation.safetensors")
    rows = [file.row(i) for i in range(len(file))]
    sampled = ask(base, [row["prompt"] for row in rows], sample=True)
    right = [boxed(text, row["answer"]) for text, row in zip(sampled, rows, strict=True)]
    few = rows[:QUESTIONS]
    questions = [row["prompt"] for row in few]
    pairs = zip(few, ask(warm, questions), ask(trained, questions), strict=True)
    answers = [Answer(row["prompt"], row["answer"], before, after) for row, before, after in pairs]
    return Comparison(sum(right) / len(right), answers)


def ask(model_dir: Path, questions: Sequence[str], sample: bool = False) -> list[str]:
    """Answers of the model in `model_dir`, greedy unless `sample`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir)
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **drawn)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
