"""Probes of data in several parts, of domains, and of dataset classes of the user's."""

from __future__ import annotations

import os
from typing import Any

import pytest

from controller.data import prepare as preparation
from controller.data.chunks import prepared_chunks
from controller.data.errors import DataError
from controller.data.prepare import prepare
from controller.ledger.group_table import GroupTable
from controller.state.job_facts import ledger_params
from controller.state.prompts import Prompts
from schema.config import Config
from tests.liveness.data import (
    DATA,
    DATASET,
    FIRST,
    FOLDER,
    HELD_OUT,
    POLICY,
    SECOND,
    answers,
    answers_that_are_scored,
    asked_of_the_hub,
    asked_of_the_hub_for_answers,
    enabled,
    from_file,
    hub,
    nothing_of_an_evaluation,
    prepared,
)
from tests.liveness.probe import UNSET, Base, Made, Observe, Place, Whole, changed, under, watch

OWN = """
class Own:
    def __init__(self, data_files):
        self.n = 3

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        text = f"question {i}"
        return {"prompt": text, "answer": "1"}

class Other(Own):
    def __init__(self):
        self.n = 2
"""  # fmt: skip
ROWS = (FIRST, SECOND)
CLASSES = tuple(Made(lambda place, name=name: f"{place.file('own.py', OWN)}:{name}") for name in ("Own", "Other"))


TOOLS = {name: [{"name": name}] for name in ("tools", "others")}
SHOWS = "{{ messages[-1]['content'] }}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"


def parts(base: Base, section: str, *given: dict[str, Any]) -> Base:
    """A job whose data in a section are these parts alone."""

    def make(place: Place) -> dict[str, Any]:
        made = [{name: _made(value, place) for name, value in part.items()} for part in given]
        return changed(base, {section: {"part": made}})(place)

    return make


def _made(value: Any, place: Place) -> Any:
    return value.make(place) if isinstance(value, Made) else value


def watch_part(observe: Observe, asked: Observe, base: Base, section: str) -> None:
    """What a part has in every section: which rows they are, and what it is called."""
    part, named = f"{section}.part", parts(base, section, {"name": FIRST, "source": "gsm8k"})
    watch(observe, named, under(part, name=ROWS, source=("gsm8k", "math_dapo")))
    watch(observe, parts(base, section, {"source": "a"}), under(part, files=tuple(map(_as_files, ROWS))))
    watch(observe, parts(base, section, {"name": FOLDER}), under(part, split=("train", "test")))
    addition = parts(base, section, {"name": "synthetic:addition"})
    watch(observe, addition, under(part, options=({"n": 24}, {"n": 12})))
    of_class = parts(base, section, {"custom_class": CLASSES[0]})
    watch(observe, of_class, under(part, custom_class=CLASSES, custom_class_timeout=(60.0, 0.01)))
    watch(asked, parts(base, section, {"name": "owner/questions"}), under(part, **hub))
    alone = changed(changed(base, {section: {}}), under(section, custom_class=CLASSES[0]))
    watch(observe, alone, under(section, custom_class=CLASSES, custom_class_timeout=(60.0, 0.01)))


def _as_files(name: Made) -> Made:
    return Made(lambda place: [name.make(place)])


bounds = {"max_prompt_length": (60, 12), "image_column_name": ("images", "origin"), "max_samples": (UNSET, 2)}

# ---- training -------------------------------------------------------------------------------------------------

watch_part(prepared, asked_of_the_hub, from_file, DATASET)
first = {"name": FIRST, "source": "first"}
watch(prepared, parts(from_file, DATASET, first), under(f"{DATASET}.part", **bounds))
short = parts(from_file, DATASET, {**first, "max_prompt_length": 12})
watch(prepared, short, under(f"{DATASET}.part", overlong_prompts=("drop", "middle")))
held_out = parts(changed(from_file, enabled), DATASET, {**first, "test_size": 2})
watch(prepared, held_out, under(f"{DATASET}.part", test_size=(2, 3)))
watch(prepared, from_file, under(DATASET, max_samples=(UNSET, 2)))
watch(prepared, from_file, under(POLICY, system_prompt_column_name=("", "origin")))
with_tools = changed(
    from_file,
    under(DATASET, name=Made(lambda place: str(place.rows("tools.jsonl", [{"prompt": "p", "answer": "1", **TOOLS}]))))
    | {"rollout.multi_turn_config.custom_chat_template_path": Made(lambda place: str(place.file("t.jinja", SHOWS)))},
)
watch(prepared, with_tools, under(POLICY, tools_column_name=("tools", "others")))


def processes(config: Config, place: Place) -> tuple[int, list[Any]]:
    """How many processes prepare the rows, in batches of which size, how far ahead."""
    forks, arguments = [], []

    def fork() -> int:
        forks.append(1)
        return fork_of_os()

    def chunks(part: Any, work: Any, *rest: Any) -> Any:
        arguments.append(rest)
        return prepared_chunks(part, work, *rest)

    fork_of_os = os.fork
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", fork)
        patch.setattr(preparation, "prepared_chunks", chunks)
        prepare(config, place.directory())
    return len(forks), arguments


several = changed(from_file, under(POLICY, dataloader_num_workers=1))
watch(processes, several, under(POLICY, dataloader_num_workers=(1, 2), dataloader_prefetch_factor=(UNSET, 3)))
watch(processes, several, under(POLICY, dataloader_batch_size=(1, 512)))


def sources_drawn(config: Config, place: Place) -> tuple[list[int], int]:
    """Answers with the sources of the first groups, and the number of all groups."""
    run_dir = place.directory()
    prepare(config, run_dir)
    path, seed = run_dir / "data" / "train.safetensors", config.effective_seed
    prompts = Prompts(path, seed=seed, shuffle=True, shares=config.shares)
    mixture = ledger_params(config, prompts.counts).mixture()
    drawn = []
    while (source := mixture.next()) is not None:
        mixture.draw(source)
        drawn.append(source)
    return drawn[:6], len(drawn)


shared = parts(from_file, DATASET, {**first, "share": 0.5}, {"name": SECOND, "source": "second", "share": 0.5})
uneven = parts(from_file, DATASET, {**first, "share": 0.75}, {"name": SECOND, "source": "second", "share": 0.25})
watch(sources_drawn, shared, under(f"{DATASET}.part", share=(0.5, Whole(uneven))))
watch(sources_drawn, shared, under(POLICY, domain_exhausted=("repeat", "stop")))
TWO = [
    {"prompt": "a", "answer": "1", "kind": "x", "level": "y"},
    {"prompt": "b", "answer": "1", "kind": "y", "level": "x"},
]
of_two = Made(lambda place: str(place.rows("two.jsonl", [*TWO, TWO[0]])))
domains = under(POLICY, domain_column_name="kind", domain_shares={"x": 0.5, "y": 0.5})
by_domain = changed(from_file, under(DATASET, name=of_two) | domains)
watch(prepared, by_domain, under(POLICY, domain_shares=({"x": 0.5, "y": 0.5}, {"x": 1.0})))
watch(
    prepared,
    changed(by_domain, under(POLICY, domain_shares={"x": 1.0})),
    under(POLICY, domain_column_name=("kind", "level")),
)


def rows_drawn(config: Config, place: Place) -> list[tuple[int, ...]]:
    """Answers with the rows of the groups of a job whose scores depend on the row alone, with their sources."""
    run_dir = place.directory()
    prepare(config, run_dir)
    curriculum, path = config.curriculum, run_dir / "data" / "train.safetensors"
    prompts = Prompts(
        path, seed=config.effective_seed, shuffle=True, shares=config.shares,
        stages=[stage.shares for stage in curriculum.stage],
        descending=curriculum.descending if curriculum.column_name else None,
    )  # fmt: skip
    table, drawn = GroupTable(ledger_params(config, prompts.counts)), []
    while table.mixture.next() is not None:
        group = table.create()
        row = prompts.row_index(*table.row_of(group))
        least = curriculum.pass_score
        table.passes.observe(group.place, [row % 3 / 2 >= least, row % 3 == 2], table.committed)
        table.committed += 1
        drawn.append((row, group.source))
    return drawn


CURRICULUM = f"{POLICY}.curriculum"
LEVELS = [{"prompt": f"p{i}", "answer": "1", "level": i * 7 % 12, "hard": i * 5 % 12} for i in range(12)]
of_levels = Made(lambda place: str(place.rows("levels.jsonl", LEVELS)))
by_level = changed(from_file, under(DATASET, name=of_levels) | {"train.epoch": 3})
watch(rows_drawn, by_level, under(CURRICULUM, column_name=("level", "hard")))
rising = changed(by_level, under(CURRICULUM, column_name="level"))
watch(rows_drawn, rising, under(CURRICULUM, descending=(False, True)))
watch(rows_drawn, by_level, under(CURRICULUM, order_by_results=("easiest_first", "hardest_first")))
watch(rows_drawn, by_level, under(CURRICULUM, leave_out_solved=(1, 2), leave_out_failed=(1, 2)))
easy = changed(by_level, under(CURRICULUM, order_by_results="easiest_first"))
watch(rows_drawn, easy, under(CURRICULUM, pass_score=(1.0, 0.5)))
other_half = {"first": 0.25, "second": 0.75}
staged = changed(shared, under(CURRICULUM, stage=[{"from_step": 1, "shares": {"first": 1.0}}]))
watch(rows_drawn, staged, under(f"{CURRICULUM}.stage", from_step=(1, 2), shares=({"first": 1.0}, other_half)))


def nothing_of_validation(config: Config, place: Place) -> str:
    """Answers with what is refused before anything reads it."""
    return config.validation.dataset.model_dump_json()


def answers_or_error(config: Config, place: Place) -> Any:
    """Answers with the lines that rewards get, or the error in place of them."""
    try:
        return answers_that_are_scored(config, place)
    except DataError as error:
        return str(error)


# ---- validation and answers -----------------------------------------------------------------------------------

validated = changed(from_file, enabled)
watch_part(prepared, asked_of_the_hub, validated, HELD_OUT)
second = parts(validated, HELD_OUT, {"name": SECOND})
watch(prepared, second, under(f"{HELD_OUT}.part", **{**bounds, "max_prompt_length": (60, 42)}))
short = parts(validated, HELD_OUT, {"name": SECOND, "max_prompt_length": 42})
watch(prepared, short, under(f"{HELD_OUT}.part", overlong_prompts=("drop", "middle")))
watch(prepared, changed(validated, under(HELD_OUT, name=SECOND)), under(HELD_OUT, max_samples=(UNSET, 2)))
watch(
    nothing_of_validation, second, under(f"{HELD_OUT}.part", test_size=(UNSET, 2), share=(UNSET, 0.5)), refused=True
)
formatted = under("evaluation", responses_column_name="answer", reward_function="format")
watch_part(answers_or_error, asked_of_the_hub_for_answers, changed(lambda place: {}, formatted), DATA)

bounds |= {"max_prompt_length": (UNSET, 12)}
refused = under(f"{DATA}.part", **bounds, test_size=(UNSET, 2), share=(UNSET, 0.5), overlong_prompts=("drop", "left"))
one_part = parts(changed(lambda place: {}, formatted), DATA, {"name": FIRST})
watch(nothing_of_an_evaluation, one_part, refused, refused=True)
watch(nothing_of_an_evaluation, answers, under(DATA, max_samples=(UNSET, 2)), refused=True)
