"""Several layers: who wins, who is named as the writer, and where faults are said to be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schema.config import ConfigError, Problem, check_config, load_config
from schema.config.keys import leaf_keys
from schema.config.loading.environment import variable_of, without_effect, written_in
from schema.config.loading.layers import read_layers
from schema.config.loading.load import LoadedConfig, load
from schema.config.loading.tomlwrite import dumps
from tests.schema.config_samples import GRPO, refused
from tests.schema.mutations import changes, mutate
from tests.support.effort import examples

BASE = """\
[train]
compile = false
epoch = 2
optm_betas = [0.8, 0.9]

[train.train_policy]
reward_function = "boxed_math"
response_column_name = "answer"
dataset.name = "synthetic:addition"

[policy]
model_name_or_path = "Qwen/Qwen3-0.6B"
parallelism.tp_size = 1

[rollout]
backend = "transformers"
parallelism.tp_size = 1

[custom]
table = { a = 1, b = [1, 2] }
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, "base.toml", BASE)


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def source(loaded: LoadedConfig, key: str) -> tuple[str, str, int | None] | None:
    origin = loaded.layers.origin(tuple(key.split(".")))
    return None if origin is None else (origin.kind, origin.name, origin.line)


def test_precedence_of_all_layers(tmp_path: Path, base: Path) -> None:
    over = write(tmp_path, "over.toml", "[train]\nepoch = 3\nseed = 1\nmax_num_steps = 5\ntimestamp = 'f'\n")
    last = write(tmp_path, "last.toml", "[train]\nseed = 2\nmax_num_steps = 6\n")
    env = {"COSMOS_TRAIN__MAX_NUM_STEPS": "7", "COSMOS_TRAIN__TIMESTAMP": "env", "COSMOS_TOKEN": "secret"}
    loaded = load([base, over, last], ["train.timestamp=set"], env)
    train = loaded.config.train
    assert (train.epoch, train.seed, train.max_num_steps, train.timestamp) == (3, 2, 7, "set")
    assert (train.sync_weight_interval, train.optm_betas) == (1, [0.8, 0.9])
    assert source(loaded, "train.sync_weight_interval") is None
    assert source(loaded, "train.compile") == ("file", str(base), 2)
    assert source(loaded, "train.epoch") == ("file", str(over), 2)
    assert source(loaded, "train.seed") == ("file", str(last), 2)
    assert source(loaded, "train.max_num_steps") == ("environment", "COSMOS_TRAIN__MAX_NUM_STEPS", None)
    assert source(loaded, "train.timestamp") == ("set", "train.timestamp=set", None)


def test_tables_merge_lists_and_values_are_replaced(tmp_path: Path, base: Path) -> None:
    over = write(tmp_path, "over.toml", "[custom.table]\nb = [3]\nc = 4\n[train]\noptm_betas = [0.5, 0.6]\n")
    loaded = load([base, over])
    assert loaded.config.custom == {"table": {"a": 1, "b": [3], "c": 4}}
    assert loaded.config.train.optm_betas == [0.5, 0.6]
    assert (loaded.config.train.epoch, loaded.config.train.compile) == (2, False)
    assert source(loaded, "custom.table.a") == ("file", str(base), 20)
    assert source(loaded, "custom.table.b") == ("file", str(over), 2)
    assert (*("custom", "table", "b"), 1) not in loaded.layers.origins, "the item of the list that is gone"


def test_a_file_replaces_the_tables_that_it_names(tmp_path: Path, base: Path) -> None:
    text = 'replace = ["custom.table", "train"]\n[custom.table]\nc = 4\n[train]\noutput_dir = "runs"\n'
    over = write(tmp_path, "over.toml", f"{text}[train.train_policy]\ndataset.name = 'synthetic:addition'\n")
    layers = read_layers([base, over], [])
    assert layers.data["custom"] == {"table": {"c": 4}}
    assert layers.data["train"] == {
        "output_dir": "runs", "train_policy": {"dataset": {"name": "synthetic:addition"}}
    }  # fmt: skip
    assert layers.data["policy"]["parallelism"] == {"tp_size": 1}, "the others are merged"
    assert layers.problems == layers.warnings == []
    written = {origin.name for path, origin in layers.origins.items() if path[0] in ("train", "custom")}
    assert written == {str(over)}, "nothing is left of the others"
    assert read_layers([over, base], []).data["custom"]["table"] == {"a": 1, "b": [1, 2], "c": 4}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('"custom"', "expected a list of tables"),
        ("[1]", "expected a list of tables"),
        ('["custm"]', "this file does not have the table custm"),
        ('["train.epoch"]', "this file does not have the table train.epoch"),
        ('["a..b"]', "this file does not have the table a..b"),
    ],
)
def test_what_cannot_be_replaced(tmp_path: Path, base: Path, value: str, message: str) -> None:
    over = write(tmp_path, "over.toml", f"replace = {value}\n[train]\nepoch = 3\n")
    (found,) = refused(load, [base, over])
    column = 1 if message.startswith("expected") else 12
    assert (found.message, found.where) == (message, f"{over}:1:{column}")


def test_a_table_that_nothing_had_is_a_warning(tmp_path: Path, base: Path) -> None:
    over = write(tmp_path, "over.toml", 'replace = ["train.ckpt"]\n[train.ckpt]\nsave_freq = 3\n')
    (warning,) = load([base, over]).warnings
    assert warning.message == "has no effect: no file before this one has the table train.ckpt"


def test_a_table_gives_way_to_a_value_and_back(tmp_path: Path, base: Path) -> None:
    plain = write(tmp_path, "plain.toml", "[custom]\ntable = 5\n")
    loaded = load([base, plain])
    assert loaded.config.custom == {"table": 5}
    assert ("custom", "table", "a") not in loaded.layers.origins
    assert load([plain, base]).config.custom["table"]["a"] == 1


def test_one_variable_and_one_set_replace_a_table(base: Path) -> None:
    assert load(base, ["custom.table={z=1}"]).config.custom == {"table": {"z": 1}}
    assert load(base, [], {"COSMOS_CUSTOM__TABLE": "{z=1}"}).config.custom == {"table": {"z": 1}}
    env = {"COSMOS_CUSTOM__TABLE__A": "5", "COSMOS_CUSTOM__TABLE": "{a=1, d=2}"}
    assert load(base, [], env).config.custom == {"table": {"a": 5, "d": 2}}, "the narrower one counts"


def test_a_single_file_and_the_old_call_still_work(base: Path) -> None:
    assert load_config(base, ["train.epoch=9"]).train.epoch == 9
    assert load_config(str(base)).train.epoch == 2
    assert load_config([base]).to_dict() == load_config(base).to_dict()


def test_the_environment_counts_only_when_it_is_passed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COSMOS_TRAIN__EPOCH", "7")
    assert load_config(base).train.epoch == 2
    assert load_config(base, env={}).train.epoch == 2
    assert load_config(base, env={"COSMOS_TRAIN__EPOCH": "7"}).train.epoch == 7


# ---- places -----------------------------------------------------------------------------------------------


def test_faults_are_placed_where_they_were_written_and_sorted_by_layer(tmp_path: Path, base: Path) -> None:
    over = write(tmp_path, "over.toml", "\n[train]\nepoch = 0\n\n[rollout]\nn_generation = 7\nzzz = 1\n")
    env = {"COSMOS_TRAIN__OPTM_LR": "fast", "COSMOS_TRAIN__MAX_STEPS": "3"}
    found = refused(load, [base, over], ["train.seed=x"], env)
    assert [(p.key, p.where) for p in found] == [
        ("train.train_batch_per_replica", f"{over}:2:1"),  # is not written: its table was, last there
        ("train.epoch", f"{over}:3:1"),
        ("rollout.zzz", f"{over}:7:1"),
        ("train.optm_lr", "environment variable COSMOS_TRAIN__OPTM_LR"),
        ("train.max_steps", "environment variable COSMOS_TRAIN__MAX_STEPS"),
        ("train.seed", "--set train.seed=x"),
    ]
    assert found[4].hint == "did you mean `max_num_steps`?"
    assert found[3].render().startswith("environment variable COSMOS_TRAIN__OPTM_LR: train.optm_lr: expected a")


def test_every_broken_file_is_named(tmp_path: Path, base: Path) -> None:
    broken = write(tmp_path, "broken.toml", "[train\n")
    found = refused(load, [broken, base, tmp_path / "absent.toml"])
    assert [p.where for p in found] == [f"{broken}:1:7", str(tmp_path / "absent.toml")]


VERL = "actor_rollout_ref: {model: {path: x}}\nalgorithm: {adv_estimator: grpo}\n"


@pytest.mark.parametrize(
    ("name", "text", "message", "hint"),
    [
        ("x.yaml", VERL, "not TOML: a file of verl", "convert it: cosmos-launch convert {}/x.yaml -o {}/x.toml"),
        ("x.yml", "actor_train: {a: 1}\n", "a file of ROLL", "cosmos-launch convert {}/x.yml -o {}/x.toml"),
        ("x.toml", VERL, "a file of verl", "rename it to {}/x.yaml, and convert it: cosmos-launch convert {}/x.yaml"),
        ("x.json", json.dumps({"actor_rollout_ref": {}}), "a file of verl", "convert {}/x.json -o {}/x.toml"),
        ("x.json", '{"train": {}}', "broken TOML", "this is JSON"),
        ("x.json", '{"zero_optimization": {}}', "this looks like a file of DeepSpeed", "cosmos-launch init"),
        ("x.yaml", "base_model: x\ndatasets: []\n", "this looks like a file of axolotl", "cosmos-launch init"),
        ("x.yaml", "a: 1\n", "no configuration of verl or ROLL or cosmos-rl (its keys: a)", "cosmos-launch init"),
        ("x.yaml", "a: [\n", "not TOML: not YAML", "indentation"),
        ("x.yaml", "[train]\nepoch = \n", "broken TOML: Invalid value", ""),
        ("x.sh", "python3 -m verl.trainer.main_ppo a.b=1\n", "a shell script of verl", "--cfg job --resolve"),
        ("x.py", "x = 1\nfrom trl import GRPOTrainer\n", "a Python script of TRL", "cosmos-launch init"),
        ("x.toml", "epoch = python train.py --a 1 --b\n", "broken TOML: Invalid value", "a string needs quotes"),
        ("x.toml", "[trainer]\n[orchestrator]\n[inference]\n", "this looks like a file of prime-rl", "cosmos-launch"),
    ],
)  # fmt: skip
def test_files_of_others_are_recognised(tmp_path: Path, name: str, text: str, message: str, hint: str) -> None:
    problem, *_ = refused(load, write(tmp_path, name, text))
    assert message in problem.message
    assert hint.replace("{}", str(tmp_path)) in problem.hint


def test_a_directory_names_a_file_in_it(tmp_path: Path, base: Path) -> None:
    (problem,) = refused(load, tmp_path)
    assert str(base) in problem.hint


def test_bottomless_nesting_is_a_fault_not_a_crash(base: Path) -> None:
    """Dotted keys nest without recursion in the TOML reader; what comes after it is recursive."""
    key = ".".join(["custom", *["a"] * 3000])
    deep = write(base.parent, "deep.toml", f"{key} = 1\n")
    variable = {key.replace(".", "__").upper().replace("CUSTOM", "COSMOS_CUSTOM"): "1"}
    lists = "custom.x=" + "[" * 100 + "]" * 100
    for arguments in ((deep,), ([base, deep, deep],), (base, [f"{key}=1"]), (base, [], variable), (base, [lists])):
        assert any("nested too deeply" in problem.message for problem in refused(load, *arguments)), arguments
    data: dict[str, object] = {}
    for _ in range(3000):
        data = {"custom": data}
    with pytest.raises(ConfigError, match="nested too deeply"):
        check_config(data)
    assert load(base, ["custom.x=" + "[" * 50 + "]" * 50]).config.custom["x"]


# ---- the environment --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("COSMOS_TRAIN__OPTM_LR", "1e-5", "train.optm_lr", 1e-5),
        ("cosmos_train__Optm_Lr", "1e-5", "train.optm_lr", 1e-5),
        ("COSMOS_TRAIN__OUTPUT_DIR", "runs/a", "train.output_dir", "runs/a"),
        ("COSMOS_TRAIN__OUTPUT_DIR", "'12'", "train.output_dir", "12"),
        ("COSMOS_TRAIN__TIMESTAMP", "", "train.timestamp", ""),
        ("COSMOS_TRAIN__OPTM_BETAS", "[0.1, 0.2]", "train.optm_betas", [0.1, 0.2]),
        ("COSMOS_TRAIN__CKPT__SAVE_FREQ", "3", "train.ckpt.save_freq", 3),
        ("COSMOS_TRAIN__TRAIN_POLICY__DATASET__OPTIONS__N", "9", "train.train_policy.dataset.options", {"n": 9}),
        ("COSMOS_CUSTOM__Deep__KEY", "true", "custom", {"table": {"a": 1, "b": [1, 2]}, "deep": {"key": True}}),
    ],
)
def test_variables(base: Path, name: str, text: str, key: str, value: object) -> None:
    found: object = load(base, [], {name: text}).config.model_dump()
    for part in key.split("."):
        found = found[part]  # type: ignore[index]
    assert found == value


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("COSMOS_TRIAN__EPOCH", "unknown section", "did you mean `train`?"),
        ("COSMOS_DB__HOST", "unknown section", "unset the variable"),
        ("COSMOS_TRAIN__", "an empty part", "COSMOS_TRAIN__OPTM_LR"),
        ("COSMOS___EPOCH", "an empty part", "COSMOS_TRAIN__OPTM_LR"),
        ("COSMOS_TRAIN__EPOC", "unknown key", "did you mean `epoch`?"),
        ("COSMOS_TRAIN__EPOCH__X", "train.epoch is not a table", ""),
    ],
)
def test_variables_that_name_nothing(base: Path, name: str, message: str, hint: str) -> None:
    (problem,) = refused(load, base, [], {name: "3"})
    assert message in problem.message
    assert hint in problem.hint
    assert problem.file == f"environment variable {name}"


def test_variables_of_processes_are_left_alone(base: Path) -> None:
    env = {"COSMOS_TOKEN": "x", "COSMOS_REDIS_PASSWORD": "x", "COSMOS_LOG_LEVEL": "x", "TRAIN__EPOCH": "0"}
    loaded = load(base, [], env)
    assert loaded.warnings == []
    assert loaded.config.to_dict() == load(base).config.to_dict()


def test_a_single_underscore_is_a_warning(base: Path) -> None:
    (warning,) = load(base, [], {"COSMOS_TRAIN_OPTM_LR": "3"}).warnings
    assert warning.hint == "write COSMOS_TRAIN__OPTM_LR"
    assert "train.optm_lr" in warning.message
    assert [w.hint for w in without_effect({"COSMOS_REDIS_URL": "x"})] == ["write COSMOS_REDIS__URL"]


def test_every_key_has_a_variable_that_writes_it() -> None:
    for key in leaf_keys():
        path = tuple(key.split("."))
        if len(path) == 1:  # a table of the user's own keys
            path = (*path, "mine")
        (found,) = written_in({variable_of(path): "1"}).variables
        assert found.path == path


@pytest.mark.scaled
@settings(max_examples=examples(25), deadline=None)
@given(st.dictionaries(st.from_regex(r"COSMOS_[A-Za-z_]{0,30}", fullmatch=True), st.text(max_size=20), max_size=4))
def test_any_environment_gets_a_clean_verdict(env: dict[str, str]) -> None:
    path = Path(__file__).parent / "absent.toml"
    with pytest.raises(ConfigError):
        load(path, [], env)
    found = written_in(env)
    assert all(variable.path for variable in found.variables)
    assert all(problem.file for problem in found.problems)
    without_effect(env)


def test_findings_are_placed_like_faults(tmp_path: Path, base: Path) -> None:
    loaded = load(base, ["controller.port=80"])
    places = loaded.placed([Problem("controller.port", "in use"), Problem("", "no vllm"), Problem("redis.url", "x")])
    assert [p.where for p in places] == ["", str(base), "--set controller.port=80"]


# ---- anything ---------------------------------------------------------------------------------------------

FEW = settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
variables = st.dictionaries(st.sampled_from([variable_of(tuple(key.split("."))) for key in leaf_keys()]), texts)


@pytest.mark.scaled
@FEW
@given(first=changes, second=changes, env=variables, sets=st.lists(texts.map("custom.x={}".format), max_size=2))
def test_spoiled_files_over_each_other(
    tmp_path: Path, first: Any, second: Any, env: dict[str, str], sets: list[str]
) -> None:
    """A clean verdict, with every place inside its file; and every origin tells the line of its key."""
    files = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for path, steps in zip(files, (first, second), strict=True):
        path.write_bytes(dumps(mutate(GRPO, steps)).encode("utf-8", "surrogatepass"))
    lines = {str(path): path.read_bytes().split(b"\n") for path in files}
    loaded, problems = verdict(files, sets, env)
    assert all(problem.file and problem.render() for problem in problems)
    assert all(problem.line <= len(lines[str(problem.file)]) for problem in problems if problem.line)
    for path, origin in loaded.layers.origins.items() if loaded else ():
        if origin.line and isinstance(path[-1], str) and path[-1].isidentifier():
            assert path[-1].encode() in lines[origin.name][origin.line - 1]


def verdict(files: list[Path], sets: list[str], env: dict[str, str]) -> tuple[LoadedConfig | None, list[Problem]]:
    """What loading says: a configuration, or what is wrong with it."""
    try:
        return load(files, sets, env), []
    except ConfigError as error:
        return None, list(error.problems)


TEACHERS = """
[[teacher]]
name = "near"
model = "a/b"

[[teacher]]
name = "far"
url = "http://a:1"
"""


def test_tables_in_a_list_are_written_one_by_one(tmp_path: Path, base: Path) -> None:
    """By --set and by variables, the next one too; whole from a later file."""
    file = write(tmp_path, "teachers.toml", TEACHERS)
    sets = ["teacher[0].weight=2.0", "teacher[2].name=third", 'teacher[2].model="c/d"', 'teacher[1].source=["x"]']
    loaded = load([base, file], sets, {"COSMOS_TEACHER__1__WEIGHT": "0.5"})
    assert [(one.name, one.weight, one.source) for one in loaded.config.teacher] == [
        ("near", 2.0, []), ("far", 0.5, ["x"]), ("third", 1.0, []),
    ]  # fmt: skip
    origin = loaded.layers.origin(("teacher", 0, "weight"))
    assert origin is not None
    assert origin.kind == "set"
    again = load([write(tmp_path, "resolved.toml", loaded.config.to_toml())])
    assert again.config == loaded.config
    only = load([base, file, write(tmp_path, "last.toml", '[[teacher]]\nname = "only"\nmodel = "e/f"')])
    assert [one.name for one in only.config.teacher] == ["only"]


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("[[teacher]]\nname = 'a'\nmodel = 'a/b'\nweigth = 1.0", ":4:1: teacher[0].weigth", "did you mean `weight`"),
        ("[teacher]\nname = 'a'", ":1:1: teacher", "write each as a table: [[teacher]]"),
        (
            "[[teacher]]\nname = 'a'\nmodel = 'a/b'\n[[teacher]]\nmodel = 3",
            ":4:1: teacher[1].name",
            "must be written",
        ),
        ("[[teachers]]\nname = 'a'", ":1:1: teachers", "did you mean `teacher`"),
    ],
)
def test_faults_in_a_list_of_tables_have_their_place(
    tmp_path: Path, base: Path, text: str, place: str, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load([base, write(tmp_path, "bad.toml", text)])
    assert f"bad.toml{place}" in str(error.value)
    assert words in str(error.value)


def test_what_cannot_be_written_into_a_list(tmp_path: Path, base: Path) -> None:
    for text, words in (
        ("teacher[3].weight=1.0", "teacher has 0 items: the next one is [0]"),
        ("train[0].seed=1", "train is not a list"),
        ("teacher[0][1].x=1", "teacher[0]: expected a list of tables"),
    ):
        with pytest.raises(ConfigError) as error:
            load([base], [text])
        assert words in str(error.value), text
