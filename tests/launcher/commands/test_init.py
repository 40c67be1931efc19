"""`init`: every recipe is sound as it is on machines of all sizes, and nothing is replaced by accident."""

from __future__ import annotations

import json
import runpy
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from controller.data.prepare import prepare
from controller.data.tokenizer import PromptTokenizer
from launcher.commands.init import InitRequest, fit_of, lines, listing, start
from launcher.commands.tiny_model import END, byte_characters, write_tiny_model
from launcher.errors import LaunchError
from launcher.plan.machine import Machine
from launcher.plan.placement import place
from launcher.recipes import RECIPES, Fit
from rollout_worker.rewards.registry import resolve
from schema.config import ConfigError, load_config
from schema.config.reference import export
from schema.wire.prompts import PromptFile
from tests.controller.data.conftest import PLAIN_TEMPLATE, save_tokenizer, write
from tests.launcher.cli import cosmos
from tests.support.effort import combinations

ROOT = Path(__file__).parents[3]
SCHEMA = export.schema_text()
PLAIN = [name for name in RECIPES if name != "addition-grpo"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export, "schema_text", lambda: SCHEMA)  # it is always the same and takes 0.3 s
    return tmp_path


def begin(recipe: str, output: str = "run.toml", **options: object) -> list[str]:
    return lines(start(InitRequest(recipe, Path(output), **options), {"CUDA_VISIBLE_DEVICES": ""}))  # type: ignore[arg-type]


MACHINES = combinations([0, 1, 2, 3, 8, 100], ["transformers", "vllm"])


@pytest.mark.parametrize("recipe", PLAIN)
@pytest.mark.parametrize(("gpus", "engine"), MACHINES)
def test_every_recipe_is_sound_and_fits_its_machine(here: Path, recipe: str, gpus: int, engine: str) -> None:
    """Of the engine a recipe has only its name and its share of memory, so each size is tried with one engine."""
    begin(recipe, gpus=gpus, engine=engine)
    config = load_config("run.toml")
    ids = tuple(map(str, range(gpus)))
    replicas = place(config, Machine(16, ids))
    used = [name for replica in replicas for name in replica.processes[0].env["CUDA_VISIBLE_DEVICES"].split(",")]
    if gpus and not recipe.startswith("addition"):
        assert set(used) == set(ids), "no GPU stays idle"
        assert len(used) == (len(ids) + 1 if gpus == 1 and config.is_grpo else len(ids))
    if config.is_grpo:
        assert config.rollout.backend == engine
        ranks = len(replicas[0].processes)
        assert config.samples_per_step % ranks == 0


def test_the_schema_for_editors_is_written_next_to_the_file(here: Path) -> None:
    begin("grpo")
    first, *_ = Path("run.toml").read_text().splitlines()
    assert first == "#:schema ./config.schema.json"
    assert Path("config.schema.json").read_text() == SCHEMA


def test_a_reward_to_start_from_is_written_once(here: Path) -> None:
    begin("sft", "a/run.toml")
    assert not Path("a/reward.py").exists()
    assert "cosmos-launch try-reward b/run.toml" in begin("grpo", "b/run.toml")
    assert '{ "b/reward.py:score" = 1.0 }' in Path("b/run.toml").read_text()
    name = "b/reward.py:score"
    load_config("b/run.toml", [f'train.train_policy.reward_function={{ "{name}" = 1.0 }}'])
    score = resolve(name, {})
    row = {"answer": "600 + 480 = 1080\n#### 1,080"}
    answers = ("so 1,080", "\\boxed{1080}", "\\boxed{1080.00}", "1080, no: 7", "")
    assert [score(answer, row) for answer in answers] == [1.0, 1.0, 1.0, 0.0, 0.0]
    readme: dict[str, Any] = {}
    exec((ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0], readme)
    for reward in (score, readme["score"]):
        for answer in (2, "2", "1 + 1 = 2\n#### 2"):
            assert [reward(text, {"answer": answer}) for text in ("it is 2", "3", "")] == [1.0, 0.0, 0.0]
        with pytest.raises((ValueError, IndexError)):
            reward("", {"answer": ""})
    Path("b/reward.py").write_text("mine")
    assert "b/reward.py: left as it is" in begin("grpo", "b/run.toml", force=True)
    assert Path("b/reward.py").read_text() == "mine"


def test_every_recipe_teaches(here: Path) -> None:
    for name, recipe in RECIPES.items():
        text = recipe.text(Fit(0, "transformers", "Qwen/Qwen3-0.6B"), "mine.toml")
        assert "cosmos-launch validate mine.toml" in text
        assert "$" not in text, name
        assert recipe.title in text
        assert text.count(" # ") > 3, "values are explained"
        assert max(map(len, text.splitlines())) <= 120
        assert tomllib.loads(text)["train"]["train_policy"]["type"] in ("grpo", "sft")
        assert any(name in line and recipe.title in line for line in listing())


def training(file: Path) -> dict[str, Any]:
    """What a file trains, and how; not where to, nor from which seed."""
    return {
        key: value
        for key, value in tomllib.loads(file.read_text())["train"].items()
        if key not in ("output_dir", "timestamp", "seed")
    }


def test_the_addition_recipes_follow_each_other(here: Path) -> None:
    with pytest.raises(LaunchError, match="addition-sft has trained") as caught:
        begin("addition-grpo")
    assert "--model" in caught.value.hint
    said = begin("addition-sft", "sft.toml")
    assert any(line.startswith("sft-model: ") for line in said)
    config = load_config("sft.toml")
    assert config.policy.model_name_or_path == "sft-model"
    assert training(Path("sft.toml")) == training(ROOT / "examples" / "quickstart" / "sft.toml")
    run = here / "outputs" / "addition" / "20260101"
    write_tiny_model(run / "final")
    (run / "config.json").write_text("{}")
    (run / "logs").mkdir()
    begin("addition-grpo", "grpo.toml")
    assert load_config("grpo.toml").policy.model_name_or_path == "outputs/addition/20260101/final"
    begin("addition-grpo", "other.toml", model="sft-model")
    assert load_config("other.toml").policy.model_name_or_path == "sft-model"


def test_init_and_what_follows(tmp_path: Path):
    assert "addition-sft" in cosmos("init", cwd=tmp_path).stdout
    cosmos("init", "addition-sft", cwd=tmp_path).says(0, "cosmos-launch validate run.toml")
    assert cosmos("validate", "run.toml", cwd=tmp_path).returncode == 0
    plan = cosmos("--config", "run.toml", "--dry-run", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert "329,472 parameters" in plan.stdout
    cosmos("init", "addition-sft", cwd=tmp_path).complains(2, "already exists")


def test_nothing_is_replaced_without_force(here: Path) -> None:
    Path("run.toml").write_text("mine")
    with pytest.raises(LaunchError, match="already exists") as caught:
        begin("grpo")
    assert "--force" in caught.value.hint
    assert Path("run.toml").read_text() == "mine"
    assert not Path("config.schema.json").exists()
    begin("grpo", force=True)
    load_config("run.toml")
    Path("config.schema.json").write_text("mine")
    said = begin("grpo", "b.toml")
    assert Path("config.schema.json").read_text() == "mine"
    assert any("left as it is" in line for line in said)
    Path("c-model").mkdir()
    with pytest.raises(LaunchError, match="c-model already exists"):
        begin("addition-sft", "c.toml")
    assert not Path("c.toml").exists()


def test_a_model_of_ones_own(here: Path) -> None:
    begin("grpo", model="owner/name")
    assert load_config("run.toml").policy.model_name_or_path == "owner/name"
    begin("addition-sft", "b.toml", model="owner/name")
    assert not Path("b-model").exists()


@pytest.mark.parametrize("recipe", ["grpo", "dapo", "gspo", "sft"])
def test_lengths_are_those_of_a_short_model(here: Path, recipe: str) -> None:
    write_tiny_model(Path("short"))
    said = begin(recipe, "a/run.toml", model="short", engine="vllm")
    assert "note: policy.model_max_length = 256: short has no more positions" in said
    config = load_config("a/run.toml")
    assert config.policy.model_max_length == 256
    if config.is_grpo:
        assert config.rollout.max_response_length == 128
    (here / "short" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        begin(recipe, "b/run.toml", model="short")
    assert not Path("b").exists()


def test_a_model_may_come_later(here: Path) -> None:
    said = begin("grpo", "a/c.toml", model="./later")
    assert "note: ./later is not there yet: validate and a start refuse it until it is" in said
    with pytest.raises(ConfigError, match="later does not exist"):
        load_config("a/c.toml")
    write_tiny_model(Path("later"))
    load_config("a/c.toml", ["rollout.max_response_length=64", "policy.model_max_length=256"])
    Path("empty").mkdir()
    for wrong in ("~/model", "empty"):
        with pytest.raises(ConfigError, match="model_name_or_path"):
            begin("grpo", "d.toml", model=wrong)
    assert not Path("d.toml").exists()


BOXED_RECIPES = [name for name, recipe in RECIPES.items() if not (recipe.supervised or recipe.is_tiny)]


@pytest.mark.parametrize("name", BOXED_RECIPES)
def test_the_prompt_asks_for_what_the_reward_checks(here: Path, name: str) -> None:
    """The form that the model is shown, filled in as it says, is worth everything; the same answer bare nothing."""
    begin(name, gpus=0, engine="transformers")
    row = {"question": "Natalia sold 48 and then 24. In all?", "answer": "48 + 24 = 72\n#### 72"}
    model, data = save_tokenizer(here / "model", PLAIN_TEMPLATE), write(here / "rows.jsonl", [row])
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    dataset = f'{{ name = "{data}" }}'
    config = load_config(
        "run.toml",
        [f"policy.model_name_or_path={model}", f"train.train_policy.dataset={dataset}", "validation.enable=false"],
    )
    prepare(config, here)
    file = PromptFile(here / "data" / "train.safetensors")
    prompt = PromptTokenizer.of(config).decode(file.token_ids(0))
    assert row["question"] in prompt
    form = r"\boxed{}"
    assert form in prompt
    (reward,) = config.grpo.reward_weights
    own = runpy.run_path("reward.py")["score"]
    for text, worth in ((form.replace("{}", "{72}"), 1.0), (form.replace("{}", "{24}"), 0.0), ("72", 0.0)):
        assert resolve(reward, {})(f"48 and 24 are 72. The answer is {text}", file.row(0)) == worth, text
        if text != "72":
            assert own(f"48 and 24 are 72. The answer is {text}", file.row(0)) == worth, text


def test_what_was_written_for_programs(here: Path) -> None:
    found = json.loads(cosmos("init", "grpo", "-o", "a/b.toml", "--model", "./later", "--json").stdout)
    assert found["recipe"] == "grpo"
    assert list(found["files"]) == ["a/b.toml", "a/config.schema.json", "a/reward.py"]
    assert found["configuration"] == Path("a/b.toml").read_text()
    assert found["commands"][-1] == "cosmos-launch --config a/b.toml"
    assert "./later is not there yet" in found["notes"][0]
    printed = json.loads(cosmos("init", "gspo", "-o", "-", "--json").stdout)
    assert (printed["files"], tomllib.loads(printed["configuration"])["rollout"]["n_generation"] > 0) == ({}, True)
    assert json.loads(cosmos("init", "--json").stdout)["recipes"].keys() == RECIPES.keys()


def test_directories_are_made_and_places_that_cannot_be_written_are_named(here: Path) -> None:
    begin("sft", "a/b/run.toml")
    load_config("a/b/run.toml")
    with pytest.raises(LaunchError, match="is a directory") as caught:
        begin("sft", "a")
    assert "a/run.toml" in caught.value.hint
    Path("file").write_text("")
    with pytest.raises(LaunchError, match="cannot be written"):
        begin("sft", "file/run.toml")


def test_the_screen_gets_the_text_alone(here: Path) -> None:
    (text,) = begin("gspo", "-", gpus=8)
    assert tomllib.loads(text)["train"]["train_policy"]["variant"] == "gspo"
    with pytest.raises(LaunchError, match="makes a model next to its file"):
        begin("addition-sft", "-")
    assert list(here.iterdir()) == []


def test_wrong_requests_are_named(here: Path) -> None:
    with pytest.raises(LaunchError, match="unknown recipe 'grop'") as caught:
        begin("grop")
    assert caught.value.hint == "did you mean grpo?"
    with pytest.raises(LaunchError, match="unknown recipe 'zzzz'"):
        begin("zzzz")
    with pytest.raises(LaunchError, match="--engine sglang is unknown"):
        begin("grpo", engine="sglang")


def test_the_machine_is_looked_at_unless_told_otherwise() -> None:
    here = fit_of(InitRequest("grpo"), {"CUDA_VISIBLE_DEVICES": ""})
    assert here.gpus == 0
    assert here.engine in ("vllm", "transformers")
    eight = InitRequest("grpo", gpus=8, engine="transformers")
    assert fit_of(eight, {"PATH": ""}) == Fit(8, "transformers"), "Triton would have no compiler"
    assert fit_of(eight, {"CC": sys.executable}) == Fit(8, "transformers", compiles=True)


@pytest.mark.parametrize(("gpus", "training", "rollout"), [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 2), (8, 4, 4)])
def test_gpus_are_split(gpus: int, training: int, rollout: int) -> None:
    fit = Fit(gpus, "vllm")
    assert (fit.training_gpus, fit.rollout_gpus) == (training, rollout)


# ---- the tiny model ---------------------------------------------------------------------------------------


def test_every_byte_has_a_character_of_its_own() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert all(character.isprintable() and not character.isspace() for character in characters)
    assert (characters[ord("A")], characters[ord(" ")], characters[ord("\n")]) == ("A", "Ġ", "Ċ")


def test_the_tokenizer_knows_text_and_whole_words(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tiny_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<think>7+6=13, é\n</think>\\boxed{13}"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len("7+6=13, ") + 2 + 1 + 3 + len("13}"), "a byte is a token, and so are three words"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id(END) == 1
    assert tokenizer.get_vocab_size() == 264


def test_weights_are_drawn_by_the_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny_model(tmp_path / name, seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    key = "model.layers.1.mlp.up_proj.weight"
    assert np.array_equal(a[key], b[key])
    assert not np.array_equal(a[key], c[key])
    assert 0.055 < a[key].std() < 0.065


@pytest.mark.slow
def test_transformers_loads_it_whole(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_model(tmp_path)
    model, loaded = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 329_472
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "user", "content": "1+1"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>1+1<|end|><|assistant|>"
