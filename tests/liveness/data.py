"""Probes of the data: what the preparation writes, from which source, with which tokenizer."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import dynamic_module_utils

from controller.data.errors import DataError
from controller.data.evaluation import prepare as read_answers
from controller.data.prepare import parts_of, prepare, tokenizer_of
from controller.data.reading.cache import FileCache
from controller.data.reading.rows_cache import key_of
from rollout_worker.evaluate import evaluate
from schema.config import Config
from schema.wire.prompts import PromptFile
from tests.liveness.probe import UNSET, Made, Place, With, changed, grpo, sft, under, watch

POLICY, TURNS = "train.train_policy", "rollout.multi_turn_config"


def prepared(config: Config, place: Place) -> dict[str, Any]:
    """Every row of every file, or the error in place of them."""
    run_dir = place.directory()
    try:
        prepare(config, run_dir)
    except DataError as error:
        return {"error": str(error)}
    return {path.stem: _rows(PromptFile(path)) for path in sorted((run_dir / "data").glob("*.safetensors"))}


def _rows(file: PromptFile) -> list[tuple[list[int], dict[str, Any]]]:
    return [(file.token_ids(i).tolist(), file.row(i)) for i in range(len(file))]


def _own_rows(count: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Rows with two columns of each kind; the prompts grow longer."""
    return [
        {
            "prompt": "p" * (8 + 2 * number),
            "question": f"q{number}",
            "answer": "1",
            "solution": "2",
            "data_source": "gsm8k",
            "origin": "cais/mmlu",
            "conversations": _conversation(f"c{number}" * (number + 1)),
            "messages": _conversation(f"m{number}"),
        }
        for number in range(first, first + count)
    ]


def _conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text * 2}]


FIRST = Made(lambda place: str(place.rows("first.jsonl", _own_rows(6))))
SECOND = Made(lambda place: str(place.rows("second.jsonl", _own_rows(4, first=6))))


def _folder(place: Place) -> str:
    """A directory with two splits."""
    for split, rows in (("train", _own_rows(3)), ("test", _own_rows(2, first=3))):
        place.rows(f"{split}.jsonl", rows)
        target = place.root / "splits" / f"{split}.jsonl"
        target.parent.mkdir(exist_ok=True)
        target.write_text(place.rows(f"{split}.jsonl", rows).read_text())
    return str(place.root / "splits")


def from_file(place: Place) -> dict[str, Any]:
    """Reinforcement learning on a file of one's own."""
    data = grpo(place)
    data["train"]["train_policy"]["dataset"] = {"name": FIRST.make(place)}
    data["policy"]["model_max_length"] = 128
    return data


def conversations_from_file(place: Place) -> dict[str, Any]:
    """Supervised training on the same file."""
    data = sft(place)
    data["train"]["train_policy"]["dataset"] = {"name": FIRST.make(place)}
    return data


DATASET, HELD_OUT = f"{POLICY}.dataset", "validation.dataset"
FOLDER, TEMPLATE = Made(_folder), Made(lambda place: str(_template(place)))
FILES = (Made(lambda place: [FIRST.make(place)]), Made(lambda place: [FIRST.make(place), SECOND.make(place)]))
OTHER_TOKENIZER = Made(lambda place: str(_other_tokenizer(place)))
columns = under(POLICY, prompt_column_name=("prompt", "question"), response_column_name=("answer", "solution"))
lengths = {"policy.model_max_length": (128, 48), "rollout.max_response_length": (16, 96)}
watch(prepared, from_file, columns | lengths | under("rollout", max_model_len=(128, 48)))
watch(prepared, from_file, under(POLICY, system_prompt=("", "Be brief.")))
sources = under(DATASET, name=(FIRST, SECOND), max_prompt_length=(60, 30), image_column_name=("images", "origin"))
watch(prepared, from_file, sources)
watch(prepared, from_file, under("policy", tokenizer_name_or_path=(UNSET, OTHER_TOKENIZER)))
watch(prepared, from_file, under("reward", prompt_forms=([], ["full_prompt"])))
watch(prepared, from_file, under(TURNS, custom_chat_template_path=(UNSET, TEMPLATE)))
own_template = changed(from_file, under(TURNS, custom_chat_template_path=TEMPLATE))
watch(prepared, own_template, under(TURNS, enable_thinking=(False, True)))
watch(prepared, changed(from_file, {DATASET: {}}), under(DATASET, files=FILES))
watch(prepared, changed(from_file, under(DATASET, name=FOLDER)), under(DATASET, split=("train", ["train", "test"])))
short = changed(from_file, under(DATASET, max_prompt_length=30))
watch(prepared, short, under(DATASET, overlong_prompts=("drop", "left")))
by_source = changed(from_file, under(POLICY, reward_function="by_source"))
watch(prepared, by_source, under(POLICY, data_source_column_name=("data_source", "origin")))
watch(prepared, grpo, under(DATASET, options=({"n": 24}, {"n": 12})))
answered = With("question", under(POLICY, response_column_name="answer"))
asked = under(POLICY, conversation_column_name=("conversations", "messages"), prompt_column_name=(UNSET, answered))
watch(prepared, conversations_from_file, asked | under(POLICY, system_prompt=("", "Be brief.")))
watch(prepared, conversations_from_file, under("policy", model_max_length=(128, 30)))
short_conversations = changed(conversations_from_file, under("policy", model_max_length=30))
watch(prepared, short_conversations, under(DATASET, overlong_prompts=("drop", "left")))
pairs = changed(conversations_from_file, under(POLICY, prompt_column_name="question"))
watch(prepared, pairs, under(POLICY, response_column_name=("answer", "solution")))
whole_pairs = changed(pairs, under(POLICY, response_column_name="answer"))
watch(prepared, whole_pairs, under(POLICY, query_column_name=("", "origin")))

# ---- the cache of remote files --------------------------------------------------------------------------------


def told_of_an_address(config: Config, place: Place) -> dict[str, Any]:
    """What a preparation without a connection says of data at an address: where it has looked for copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return prepared(config, place)


def copies_that_stay(config: Config, place: Place) -> set[str]:
    """Which of two copies of 600 MiB each are left in the cache of the job's data when room is made."""
    settings = config.train.train_policy.dataset.cache
    cache = FileCache(place.directory() / "cache", settings.n_bytes)
    for name, used in (("old", 1), ("new", 2)):
        copy = cache.root / "copies" / name
        copy.touch()
        os.truncate(copy, 600 * 2**20)
        record = copy.with_suffix(".json")
        record.touch()
        os.utime(record, (used, used))
    cache.make_room(0)
    return {copy.name for copy in (cache.root / "copies").glob("*.json")}


def key_of_rows(config: Config, place: Place) -> str:
    """What the rows of a job would be kept under, or the error in place of them."""
    try:
        return key_of(config, parts_of(config, place.directory()), tokenizer_of(config), None, {})
    except DataError as error:
        return str(error)


def kept_rows(config: Config, place: Place) -> bool:
    """Whether the preparation of a job keeps its rows for others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place.directory()))
        prepared(config, place)
        return bool(list(config.train.train_policy.dataset.cache.root.glob("rows/*.json")))


at_address = changed(from_file, under(DATASET, name="s3://bucket/rows.jsonl"))
watch(
    told_of_an_address, at_address, under(POLICY, dataset_cache_dir=("", Made(lambda place: str(place.root / "c"))))
)
watch(copies_that_stay, at_address, under(POLICY, dataset_cache_size=(100.0, 1.0)))

watch(kept_rows, from_file, under(POLICY, enable_dataset_cache=(False, True)))

# ---- held-out data --------------------------------------------------------------------------------------------

enabled = under("validation", enable=True)
cut_off = changed(from_file, enabled | under(DATASET, test_size=2))
watch(prepared, cut_off, under(DATASET, test_size=(2, 3)) | under("train", seed=(1, 2)))
watch(prepared, cut_off, under("validation", enable=(True, False), max_response_length=(16, 96)))
validated = changed(from_file, enabled | under(HELD_OUT, name=SECOND))
bounds = under(HELD_OUT, max_prompt_length=(100, 42), image_column_name=("images", "origin"))
watch(prepared, validated, bounds | under(HELD_OUT, name=(SECOND, FIRST)))
watch(prepared, changed(validated, under(HELD_OUT, name=FOLDER)), under(HELD_OUT, split=("train", "test")))
short = changed(validated, under(HELD_OUT, max_prompt_length=42))
watch(prepared, short, under(HELD_OUT, overlong_prompts=("drop", "right")))
watch(prepared, changed(from_file, enabled), under(HELD_OUT, files=FILES))
synthetic = changed(from_file, enabled | under(HELD_OUT, name="synthetic:addition"))
watch(prepared, synthetic, under(HELD_OUT, options=({"n": 24}, {"n": 12})))
conversations = changed(conversations_from_file, enabled | under(HELD_OUT, name=SECOND))
watch(prepared, conversations, under(HELD_OUT, name=(SECOND, FIRST)) | under("validation", enable=(True, False)))
short = changed(conversations, under("policy", model_max_length=30))
watch(prepared, short, under(HELD_OUT, overlong_prompts=("drop", "left")))


turns = under("validation", generate=True, reward_function="boxed_math", max_response_length=16)
watch(prepared, changed(conversations, turns), under("validation", reference_column_name=("", "solution")))


def nothing(config: Config, place: Place) -> float | int | None:
    """What is refused before anybody reads it."""
    return config.validation.dataset.test_size


watch(nothing, validated, under(HELD_OUT, test_size=(UNSET, 2)), refused=True)

# ---- the hub --------------------------------------------------------------------------------------------------


def asked_of_the_hub(config: Config, place: Place) -> list[tuple[Any, ...]]:
    """What the library that loads datasets of the hub is asked for."""
    return _asked_of_the_hub(lambda: prepare(config, place.directory()))


def _asked_of_the_hub(work: Callable[[], Any]) -> list[tuple[Any, ...]]:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(*arguments: Any, **named: Any) -> Any:
        asked.append((*arguments, *sorted(named.items())))
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(_own_rows(6))})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load_dataset)
        work()
    return asked


hub = {"subset": ("", "main"), "revision": ("", "v2")}
watch(asked_of_the_hub, changed(from_file, under(DATASET, name="owner/questions")), under(DATASET, **hub))
held_out_hub = changed(from_file, enabled | under(HELD_OUT, name="owner/questions"))
watch(asked_of_the_hub, held_out_hub, under(HELD_OUT, **hub))

# ---- answers of a file ----------------------------------------------------------------------------------------


def answers(place: Place) -> dict[str, Any]:
    """A job that scores answers of a file."""
    return {"evaluation": {"dataset": {"name": str(_answers(place, 4)), "split": ""}}}


def _answers(place: Place, count: int) -> Path:
    rows = [
        {
            **row, "responses": [r"\boxed{1}", r"\boxed{2}"], "others": [r"\boxed{2}"],
            "data_source": "math_dapo", "origin": "gsm8k",
        }
        for row in _own_rows(count)
    ]  # fmt: skip
    return place.rows(f"answers-{count}.jsonl", rows)


def answers_that_are_scored(config: Config, place: Place) -> list[dict[str, Any]]:
    """Every line that the rewards get."""
    run_dir = place.directory()
    read_answers(config, run_dir)
    return [json.loads(line) for line in (run_dir / "data" / "evaluation.jsonl").read_text().splitlines()]


def scores(config: Config, place: Place) -> dict[str, Any]:
    """The scores of all answers, by source."""
    run_dir = place.directory()
    read_answers(config, run_dir)
    found = asyncio.run(evaluate(config, run_dir))
    passed = found["scores"]["passed"]["1"]["value"]
    return {**found["sources"], "all": found["score"], "passed": passed}


DATA = "evaluation.dataset"
ANSWERS = tuple(Made(lambda place, count=count: str(_answers(place, count))) for count in (4, 2))
watch(
    answers_that_are_scored,
    answers,
    under(
        "evaluation",
        prompt_column_name=("prompt", "question"),
        responses_column_name=("responses", "others"),
        reference_column_name=("answer", "solution"),
        data_source_column_name=("data_source", "origin"),
    )
    | under(DATA, name=ANSWERS),
)
files = tuple(Made(lambda place, one=one: [one.make(place)]) for one in ANSWERS)
watch(answers_that_are_scored, lambda place: {"evaluation": {}}, under(DATA, files=files))
named = changed(lambda place: {"evaluation": {"responses_column_name": "solution"}}, under(DATA, name=FOLDER))
watch(answers_that_are_scored, named, under(DATA, split=("train", "test")))
formatted = under("evaluation", responses_column_name="answer", reward_function="format")
synthetic_answers = changed(lambda place: {}, formatted | under(DATA, name="synthetic:addition"))
watch(answers_that_are_scored, synthetic_answers, under(DATA, options=({"n": 24}, {"n": 12})))
referenced = changed(answers, under("evaluation", reference_column_name="answer"))
watch(scores, referenced, under("evaluation", reward_function=("by_source", {"by_source": 0.5, "format": 0.25})))
watch(scores, referenced, under("evaluation", pass_score=(1.0, 0.0)))


def asked_of_the_hub_for_answers(config: Config, place: Place) -> list[tuple[Any, ...]]:
    """What the library that loads datasets of the hub is asked for."""
    return _asked_of_the_hub(lambda: read_answers(config, place.directory()))


of_the_hub = changed(named, under(DATA, name="owner/answers"))
watch(asked_of_the_hub_for_answers, of_the_hub, under(DATA, **hub))


def nothing_of_an_evaluation(config: Config, place: Place) -> str:
    """What is refused before anybody reads it."""
    return config.evaluation.dataset.model_dump_json()


refused = under(DATA, test_size=(UNSET, 2), max_prompt_length=(UNSET, 20), overlong_prompts=("drop", "left"))
watch(
    nothing_of_an_evaluation, answers, refused | under(DATA, image_column_name=("images", "pictures")), refused=True
)

# ---- tokenizer and code of others -----------------------------------------------------------------------------


def _other_tokenizer(place: Place) -> Path:
    from tests.controller.data.conftest import PLAIN_TEMPLATE, save_tokenizer

    path = place.root / "other-tokenizer"
    return path if path.exists() else save_tokenizer(path, PLAIN_TEMPLATE.replace("assistant", "helper"))


def _template(place: Place) -> Path:
    """A chat template that thinks."""
    path = place.root / "thinking.jinja"
    path.write_text("{{ messages[-1]['content'] }}{% if enable_thinking %}<think>{% endif %}")
    return path


OWN_CODE = """
from transformers import PreTrainedTokenizerFast

class Own(PreTrainedTokenizerFast):
    pass
"""


def _tokenizer_with_code(place: Place) -> Path:
    """A tokenizer whose class is in a file of its own directory."""
    from tests.controller.data.conftest import PLAIN_TEMPLATE, save_tokenizer

    path = place.root / "own-tokenizer"
    if not path.exists():
        save_tokenizer(path, PLAIN_TEMPLATE)
        (path / "own_tokenizer.py").write_text(OWN_CODE)
        settings = json.loads((path / "tokenizer_config.json").read_text())
        settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.Own"]}}
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def code_that_has_run(config: Config, place: Place) -> tuple[bool, bool]:
    """Whether the preparation imported a user's module, and whether it ran the tokenizer's own code."""
    for name in [name for name in sys.modules if name == USER_MODULE or name.endswith(".own_tokenizer")]:
        del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(place.root / "modules"))
        patch.setattr(sys, "path", list(sys.path))
        found = prepared(config, place)
    own = any(name.endswith(".own_tokenizer") for name in sys.modules)
    return USER_MODULE in sys.modules, own and "error" not in found


USER_MODULE = "tabnanny"  # of the standard library, and imported by nobody
watch(code_that_has_run, from_file, under("policy", external_modules=([], [USER_MODULE])))
with_code = changed(from_file, under("policy", tokenizer_name_or_path=Made(lambda p: str(_tokenizer_with_code(p)))))
watch(code_that_has_run, with_code, under("policy", trust_remote_code=(False, True)))
