"""Sizes, files and texts beyond reason end in a few problems: nothing hangs, nothing fills memory or the screen."""

from __future__ import annotations

import cProfile
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from convert import convert, convert_text
from convert.engine import strangers
from convert.engine.source import MAX_LEAVES
from launcher.plan.machine import Machine
from launcher.plan.needs import PlacementError
from launcher.plan.placement import place
from schema.config import ConfigError, Problem, check_config, load_config
from schema.config.columns import UnreadableDataError, columns_of
from schema.config.loading import explain
from schema.config.loading.explain import MOST_ITEMS
from schema.config.loading.layers import read_layers
from schema.config.loading.load import load
from schema.config.loading.tomlread import MAX_FILE_BYTES
from schema.config.loading.tomlwrite import dumps
from schema.config.loading.yamlread import read_yaml
from schema.config.model_facts import BrokenModelError, read_config
from schema.config.problem import MOST_SHOWN, MOST_TEXT
from schema.config.rules.reward import reward_problems
from schema.config.secrets import masked
from schema.util.tls import TlsFileError, client_context
from tests.schema.config_samples import GRPO, SFT, changed, refused
from tests.schema.remedies import written


def refusal(data: dict[str, Any] | str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        check_config(data) if isinstance(data, dict) else load_config(data)
    return error.value


# ---- files ------------------------------------------------------------------------------------------------


def a_directory(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda path: path.symlink_to("/dev/null"), "a device, not a file", "write it to a file first"),
        (lambda path: path.write_bytes(b"#" * (MAX_FILE_BYTES + 1)), "larger than 1048576 bytes", "right file?"),
        (a_directory, "Is a directory", "give the path of a"),
        (a_socket, "cannot be read", ""),
        (lambda path: path.symlink_to(path.name), "symbolic links", ""),
        (lambda path: path.write_bytes(b"a = '\xff'"), "not a text in UTF-8 (byte 5)", "save the file as UTF-8"),
        (lambda path: path.write_bytes(b"a = '\0'"), "a binary file, not a text", "give the path of a"),
    ],
)
@pytest.mark.parametrize("read", [load_config, convert])
def test_what_is_not_a_file_of_text(tmp_path, monkeypatch, make, message, hint, read) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "run.toml")
    (problem,) = refused(read, "run.toml")
    assert message in problem.message
    assert hint in problem.hint
    assert problem.message.count("run.toml") == 0, "the file stands before the message already"


def test_what_a_job_names_is_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "reward.py", "tls.pem", "config.json"):
        Path(name).symlink_to("/dev/null")
    with pytest.raises(UnreadableDataError, match="does not exist"):
        columns_of(Path("nul\0.json"), (), ())
    with pytest.raises(UnreadableDataError, match="is a pipe or a device"):
        columns_of(Path("rows.jsonl"), (), ())
    (problem,) = reward_problems("reward", "reward.py:f", {"reward.py:f": 1.0}, {})
    assert "a device, not a file" in problem.message
    with pytest.raises(TlsFileError, match="not a file"):
        client_context("tls.pem")
    with pytest.raises(BrokenModelError, match="a device, not a file"):
        read_config(Path("config.json"))


# ---- how many problems ------------------------------------------------------------------------------------


def test_many_problems_are_counted_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 unknown sections: the first ones in the order of the file, with a remedy, and a count of the others."""
    asked: list[str] = []
    closest = explain.closest
    monkeypatch.setattr(explain, "closest", lambda word, words: asked.append(word) or closest(word, words))
    file = tmp_path / "run.toml"
    file.write_text(dumps(GRPO) + "".join(f"[sec{number}]\na = 1\n" for number in range(5_000)))
    error = refusal(str(file))
    assert (len(error.problems), error.more, error.count) == (MOST_SHOWN, 4_900, 5_000)
    assert [problem.key for problem in error.problems] == [f"sec{number}" for number in range(MOST_SHOWN)]
    assert all(problem.hint.startswith("known here: train") for problem in error.problems)
    assert error.render().endswith("\nand 4,900 more")
    assert len(asked) <= 2 * MOST_SHOWN, "did-you-mean of what is not shown"


def test_a_list_of_wrong_items_is_one_fault_of_many(tmp_path: Path) -> None:
    error = refusal(changed(GRPO, logging__logger=["x"] * 10_000, train__epohc=1))
    assert [problem.key for problem in error.problems] == [
        "train.epohc",
        *(f"logging.logger[{index}]" for index in range(MOST_ITEMS)),
        "logging.logger",
    ]
    assert error.problems[-1].message == f"{10_000 - MOST_ITEMS:,} more of its items are wrong"


def test_a_wrong_item_of_a_list_takes_few_calls() -> None:
    """A config that a controller validates may hold hundreds of thousands of them."""

    def calls_for(n: int) -> int:
        profile = cProfile.Profile()
        profile.runcall(refusal, changed(GRPO, policy__lora={"target_modules": [1] * n}))
        return sum(entry.callcount for entry in profile.getstats())

    assert calls_for(2000) - calls_for(1000) < 100_000


@pytest.mark.parametrize(
    "data",
    [
        {"k" * 100_000: 1},
        {"train": {"optm_name": "x" * 100_000}},
        changed(GRPO, placement__policy=list(range(15_000)), placement__rollout=list(range(15_000))),
        changed(GRPO, train__train_policy__domain_shares={f"d{n}": -1.0 for n in range(10_000)}),
        changed(GRPO, train__train_policy__reward_function=[f"r{n}" for n in range(1_000)]),
    ],
)
def test_long_names_and_values_are_cut(data: dict[str, Any]) -> None:
    error = refusal(data)
    assert len(error.render()) < MOST_SHOWN * 3 * MOST_TEXT
    for problem in error.problems:
        assert max(map(len, (problem.key, problem.message, problem.hint))) < MOST_TEXT + 50
        assert len(str(problem.value)) < 20_000


def test_what_was_masked_stays_masked_where_it_is_cut() -> None:
    url = f"redis://user:{'p' * 3 * MOST_TEXT}@host"
    problem = Problem("redis.url", f"cannot reach {url}", url, url)
    assert "ppp" not in f"{problem}"
    assert "ppp" not in masked(f"{'a' * 40}://user:ppp@host")


def test_a_rule_is_silent_about_keys_that_are_faulty() -> None:
    keys = [problem.key for problem in refusal(changed(GRPO, rollout__n_generation="x")).problems]
    assert keys == ["rollout.n_generation"]
    keys = [problem.key for problem in refusal(changed(GRPO, train__train_policy=3)).problems]
    assert keys == ["train.train_policy"]


# ---- what the loader costs --------------------------------------------------------------------------------


class Counting(dict):  # type: ignore[type-arg]
    """A dict that counts how often it is walked as a whole."""

    walks = 0

    def items(self):  # type: ignore[no-untyped-def]
        Counting.walks += 1
        return super().items()


def test_a_file_over_a_file_looks_at_each_key_once(tmp_path: Path) -> None:
    one = tmp_path / "one.toml"
    one.write_text("[custom]\n" + "".join(f"k{number} = {number}\n" for number in range(500)))
    layers = read_layers([one], [])
    layers.origins = Counting(layers.origins)
    for number in range(500):
        layers.assign(("custom", f"k{number}"), [number], layers.origins[("custom",)])
    assert Counting.walks == 0
    assert layers.data["custom"]["k7"] == [7]
    assert ("custom", "k7", 0) in layers.origins
    layers.assign(("custom", "k7"), 8, layers.origins[("custom",)])
    assert ("custom", "k7", 0) not in layers.origins


@pytest.mark.parametrize(
    "text", ["a." * 300_000 + "a = 1", "x = {" + "a . " * 100 + "a = 1}", "[" + '"a".' * 100 + "a]\nb = 1"]
)
def test_a_key_of_too_many_parts_is_refused_unparsed(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    for read in (load_config, convert):
        (problem,) = refused(read, str(tmp_path / "run.toml"))
        assert "nested too deeply: a key of more than 64 parts" in problem.message


def test_an_override_of_too_many_parts(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    for text in ("a." * 50_000 + "a=1", "custom.x={" + "a." * 40_000 + "a=1}"):
        problems = refused(load, tmp_path / "run.toml", [text])
        assert all(len(problem.render()) < 3 * MOST_TEXT for problem in problems)


def test_thousands_of_digits(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[custom]\nx = " + "1" * 5000)
    problem = refusal(str(tmp_path / "run.toml")).problems[0]
    assert "thousands of digits" in problem.message
    assert "2^63" in problem.hint


HUGE = 10**4000 + 7


def test_integers_that_no_computer_word_holds_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    deep = {"mine": [1, 2**1023, {"deep": [{"er": -(2**1023)}]}]}
    data = changed(GRPO, train__train_batch_per_replica=HUGE, policy__parallelism__n_init_replicas=-HUGE, custom=deep)
    found = {problem.key: problem.message for problem in refusal(data).problems}
    keys = {"train.train_batch_per_replica", "policy.parallelism.n_init_replicas"}
    assert found.keys() == keys | {"custom.mine[1]", "custom.mine[2].deep[0].er"}
    assert "an integer of 13288 bits" in found["train.train_batch_per_replica"]
    assert check_config(changed(GRPO, custom={"mine": [2**1023 - 1, -(2**70)]})).custom
    (tmp_path / "run.toml").write_text(f"[train]\nepoch = 0x{'F' * 5000}\n")
    (problem,) = [one for one in refusal(str(tmp_path / "run.toml")).problems if one.key == "train.epoch"]
    assert (problem.line, problem.column) == (2, 1)


# ---- sizes ------------------------------------------------------------------------------------------------

SIZES = [
    *(f"rollout.parallelism.{name}" for name in ("n_init_replicas", "tp_size", "dp_shard_size")),
    *(f"policy.parallelism.{name}" for name in ("n_init_replicas", "tp_size", "pp_size", "dp_replicate_size")),
    *("placement.nodes", "placement.gpus_per_node", "autoscale.max_replicas", "reward_model.n_init_replicas"),
    *("launcher.cpu_threads", "reward.num_workers", "rollout.n_generation", "rollout.max_concurrent_samples"),
    *("train.train_batch_per_replica", "policy.model_max_length", "train.epoch", "train.max_num_steps"),
]


@pytest.mark.parametrize("key", SIZES)
def test_a_size_beyond_reason_names_the_bound(key: str) -> None:
    """Each of these made lists, processes or products of that length: a MemoryError, or minutes."""
    for value in (10**18, 2**400) if key not in ("train.epoch", "train.max_num_steps") else (2**64, 2**400):
        (problem,) = refusal(written(GRPO, {key: value})).problems
        assert problem.key == key
        assert problem.message.startswith("must be at most ") or "is too large for any purpose" in problem.message


def test_a_job_without_gpus_has_a_process_for_each_rank() -> None:
    """They are refused before they are listed: 65,536 would fill the screen of --dry-run."""
    ranks = check_config(
        changed(GRPO, policy__parallelism__n_init_replicas=1, rollout__parallelism__n_init_replicas=5000)
    )
    with pytest.raises(PlacementError, match=r"5001 worker processes .* are more than the 256"):
        place(ranks, Machine(2))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.optm_lr", 1.5, "at most 1"),
        ("train.optm_lr", [30.0], "at most 1"),
        ("critic.optm_lr", 2, "at most 1"),
        ("train.train_policy.temperature", 101.0, "at most 100"),
        ("rollout.sampling_config.temperature", 1e300, "at most 100"),
        ("validation.temperature", 1000, "at most 100"),
        ("validation.temperature", 0.005, "below 0.01"),
        ("rollout.sampling_config.temperature", 1e-300, "below 0.01"),
        ("controller.heartbeat_timeout", 1e300, "at most 100000000"),
        ("launcher.shutdown_timeout", 1e300, "at most 100000000"),
    ],
)
def test_a_number_beyond_reason(key: str, value: Any, words: str) -> None:
    (problem,) = refusal(written(GRPO, {key: value})).problems
    assert problem.key.startswith(key)
    assert words in problem.message
    assert problem.hint


# ---- texts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "blamed", "words"),
    [
        ("train.output_dir", "out\x1b]0;title\x07", "train.output_dir", "U+001B at position 4"),
        ("policy.model_name_or_path", "a\nb", "policy.model_name_or_path", "U+000A"),
        ("train.train_policy.dataset.files", ["b\0.jsonl"], "train.train_policy.dataset.files[0]", "U+0000"),
        ("logging.experiment_name", "x\u2028y", "logging.experiment_name", "U+2028"),
        ("weight_sync.store", "\x9b1m", "weight_sync.store", "U+009B"),
        ("logging.experiment_name", "x\u202ey", "logging.experiment_name", "U+202E"),
        ("redis.url", "redis://host/\r0", "redis.url", "U+000D"),
        ("rollout.sampling_config.stop", ["ok", ""], "rollout.sampling_config.stop[1]", "before its first token"),
        ("train.output_dir", "  ", "train.output_dir", "blank"),
        ("policy.external_modules", [""], "policy.external_modules[0]", "blank"),
        ("train.train_policy.dataset.split", ["train", " "], "train.train_policy.dataset.split[1]", "blank"),
        ("logging.experiment_name", "\u3000", "logging.experiment_name", "blank"),
        ("logging.experiment_name", "", "logging.experiment_name", "must not be empty"),
        ("logging.project_name", "", "logging.project_name", "must not be empty"),
    ],
)  # fmt: skip
def test_texts_that_name_nothing_or_forge_lines(key: str, value: Any, blamed: str, words: str) -> None:
    problems = [problem for problem in refusal(written(GRPO, {key: value})).problems if problem.key == blamed]
    assert any(words in problem.message for problem in problems), problems


def test_texts_for_the_model_have_line_breaks() -> None:
    check_config(changed(GRPO, rollout__sampling_config__stop=["\n\n", " ", "\t"]))
    check_config(changed(SFT, train__train_policy__system_prompt="Be short.\n\tBe right."))
    check_config(changed(GRPO, train__output_dir="mes données/été", custom={"a": "\x1b\n", "b": [""]}))


# ---- files of other systems -------------------------------------------------------------------------------

VERL = "actor_rollout_ref:\n  actor:\n    strategy: fsdp\n  strange:\n"


def test_unknown_keys_of_another_system_cost_a_hundred_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(strangers, "closest", lambda word, words: asked.append(word))
    text = VERL + "".join(f"    k{number}: {number}\n" for number in range(2_000))
    (problem,) = refused(convert_text, text, "verl.yaml")
    assert "2000 of its 2001 keys are not keys of verl" in problem.message
    assert len(asked) == MOST_SHOWN


@pytest.mark.parametrize("name", ["verl.yaml", "cosmos.toml"])
def test_too_many_keys_are_another_file(name: str) -> None:
    text = VERL + "".join(f"    k{number}: {number}\n" for number in range(MAX_LEAVES))
    if name.endswith(".toml"):
        text = "".join(f"[train.x{number}]\na = 1\n" for number in range(MAX_LEAVES + 1))
    (problem,) = refused(convert_text, text, name)
    assert "more than 10000 keys" in problem.message


def test_merged_keys_know_their_lines() -> None:
    """Each merge took a copy of all lines so far: 19,000 of them took 17 s."""
    text = "base: &b {a: 1, b: 2}\nx:\n  <<: *b\n  b: 3\nlate: {<<: [*b, {c: 1}]}\n"
    data, lines, _ = read_yaml(text, "f.yaml")
    assert data["x"] == {"a": 1, "b": 3}
    assert data["late"] == {"a": 1, "b": 2, "c": 1}
    assert (lines["x", "b"], lines["x", "a"], lines["late", "a"], lines["late", "c"]) == (4, 1, 1, 5)
