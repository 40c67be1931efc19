"""Every process of a job reads and writes the text that `tokenizer.json` says, and the data report says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.data.prepare import prepare
from policy_worker.training.teachers import tokenizer_of
from rollout_worker.groups.tokens import load_tokenizer
from schema.wire import data_report
from schema.wire.prompts import PromptFile
from tests.controller.data.conftest import write
from tests.controller.data.test_prepare import config
from tests.tokenization.files import TEXT, of_file, save


@pytest.mark.parametrize("label", ["LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_all_processes_read_and_write_as_the_file_does(label: str, tmp_path: Path) -> None:
    directory = save(tmp_path / "model", "byte_level", label, eos_token="</s>")
    ids = of_file(directory).encode(TEXT).ids
    job = config(directory, write(tmp_path / "rows.jsonl", [{"prompt": TEXT}]), {})
    prepare(job, tmp_path)
    report = data_report.read(tmp_path)
    assert report is not None
    assert report.files["train"].samples == [TEXT]
    said = [text for text in report.warnings if "which contradicts tokenizer.json: " in text]
    assert len(said) == (0 if label == "PreTrainedTokenizerFast" else 1)
    assert PromptFile(tmp_path / "data" / "train.safetensors").token_ids(0).tolist() == ids
    assert tokenizer_of(job)(TEXT) == ids
    assert load_tokenizer(job.policy).decode(ids, skip_special_tokens=True) == TEXT
