"""The words of a job, with verl's files and without, and files that Hydra composes, as `convert` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from convert import convert
from convert.engine.model import Conversion
from convert.launches.reading import ConversionRequest
from convert.launches.words import launch_of, launch_of_text
from tests.convert.files import value_of, values_of
from tests.schema.config_samples import refused

WORDS = """verl.trainer.main_ppo
--config-path=./config
--config-name=ppo_megatron_trainer
algorithm.adv_estimator=grpo
data.train_files=["a.parquet","b.parquet"]
data.train_batch_size=96
actor_rollout_ref.rollout.n=4
actor_rollout_ref.model.path=org/model
actor_rollout_ref.actor.ppo_mini_batch_size=24
+actor_rollout_ref.actor.megatron.override_transformer_config.x=1
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
trainer.logger=[console,"wandb"]
~critic.optim
"""
TRAINER = """
defaults: [actor@actor_rollout_ref.actor: dp_actor, _self_]
algorithm: {adv_estimator: gae}
data: {train_files: x.parquet, train_batch_size: 1024}
actor_rollout_ref: {rollout: {n: 1}, model: {path: org/other}, actor: {ppo_mini_batch_size: 256}}
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def said(conversion: Conversion) -> str:
    return "\n".join(conversion.warnings)


def test_words_alone_have_the_converters_defaults(tmp_path: Path) -> None:
    result = convert(write(tmp_path / "words.txt", WORDS))
    assert (result.system, result.kind) == ("verl", "rl")
    keys = ("train.train_batch_per_replica", "rollout.n_generation", "policy.parallelism.tp_size")
    assert list(values_of(result, keys).values()) == [384, 4, 2], "of Megatron, as the configuration's name says"
    assert value_of(result, "train.train_policy.dataset.files") == ["a.parquet", "b.parquet"]
    assert "starts verl.trainer.main_ppo" in said(result)
    assert "ppo_megatron_trainer.yaml of verl itself is not here" in said(result)
    assert "megatron trains" in said(result)
    assert "~critic.optim removes keys of verl's files" in said(result)


def test_words_are_applied_to_files_that_are_here(tmp_path: Path) -> None:
    verl = tmp_path / "verl"
    write(verl / "verl/trainer/config/ppo_trainer.yaml", TRAINER)
    write(verl / "verl/trainer/config/actor/dp_actor.yaml", "strategy: fsdp\nclip_ratio: 0.3\n")
    words = write(tmp_path / "words.txt", "actor_rollout_ref.rollout.n=8\nalgorithm.adv_estimator=grpo\n")
    result = convert(words, request=ConversionRequest(["data.train_batch_size=96"], [verl]))
    assert value_of(result, "train.train_batch_per_replica") == 768
    assert value_of(result, "train.train_policy.epsilon_high") == 0.3
    assert "composed with" in said(result)
    (problem,) = refused(convert, words, request=ConversionRequest(["data.train_batch=96"], [verl]))
    assert "sets `data.train_batch`, which the configuration does not have" in problem.message


def test_a_yaml_may_name_files_of_verl_that_are_not_here(tmp_path: Path) -> None:
    text = "defaults: [ppo_trainer, _self_]\nhydra: {searchpath: [file://verl/trainer/config]}\ndata: {seed: 5}\n"
    job = write(tmp_path / "job.yaml", text)
    result = convert(job, request=ConversionRequest(["actor_rollout_ref.rollout.n=8"]))
    assert value_of(result, "rollout.n_generation") == 8
    assert "ppo_trainer.yaml of verl itself is not here" in said(result)
    assert result.entry("data.seed").line == 3
    job.write_text(text.replace("ppo_trainer", "mine"))
    (problem,) = refused(convert, job)
    assert "names `mine`, which is not there" in problem.message
    assert "--search-path DIR" in problem.hint


def test_supervised_words_have_the_defaults_of_their_program(tmp_path: Path) -> None:
    words = "verl.trainer.sft_trainer\nmodel.path=org/model\nengine=megatron\nengine.tensor_model_parallel_size=2\n"
    result = convert(write(tmp_path / "words.txt", words + "trainer.n_gpus_per_node=4\n"))
    keys = ("train.optm_betas", "train.optm_warmup_steps", "train.optm_decay_type", "policy.parallelism.tp_size")
    assert (result.kind, list(values_of(result, keys).values())) == ("sft", [[0.9, 0.999], 0, None, 2])
    older = convert(write(tmp_path / "older.txt", words.replace("sft_trainer", "fsdp_sft_trainer")))
    assert value_of(older, "train.optm_betas") == [0.9, 0.95]


@pytest.mark.parametrize(
    ("line", "system"),
    [
        ("python3 -m verl.trainer.main_ppo a=1", "verl"),
        ("torchrun --nproc_per_node 8 -m verl.trainer.sft_trainer a=1", "verl"),
        ("ray job submit -- python3 -m recipe.dapo.main_dapo a=1", "verl"),
        ("python examples/start_rlvr_pipeline.py --config_path x --config_name y", "roll"),
        ("cosmos-rl --config run.toml", "cosmos-rl"),
        ("python3 -m verl.model_merger merge", None),
        ("echo verl.trainer.main_ppo", None),
        ("python train.py a=1", None),
    ],
)
def test_programs_are_found_behind_what_starts_them(line: str, system: str | None) -> None:
    launch = launch_of(line.split())
    assert (None if launch is None else launch.system) == system


@pytest.mark.parametrize("text", ["", "a: 1\n", "a=1\nb=2\n", "x = 1\n[algorithm]\n", "# only a comment\n"])
def test_other_texts_are_no_words(text: str) -> None:
    assert launch_of_text(text, "f", Path()) is None


FAULTS: list[tuple[dict[str, str], list[str], str]] = [
    ({"w.txt": "verl.trainer.main_ppo\na=b=c\n"}, [], "the word `a=b=c`: `=` cannot stand here unquoted"),
    ({"w.txt": "verl.trainer.main_ppo\nx=1\nx.y=2\n"}, [], "a part of `x.y` has a value in front of it"),
    ({"w.txt": "verl.trainer.main_ppo\n--config-name=mine\n"}, [], "is configured by mine.yaml, which is not here"),
    (
        {"w.txt": "start_rlvr_pipeline.py\n--config_name=a\n"},
        [],
        "names the configuration a.yaml, which is not there",
    ),
    ({"w.txt": "cosmos-rl\n"}, [], "cosmos-rl is started without --config"),
    ({"c.toml": "[train]\n", "w.txt": "cosmos-rl\n--config=c.toml\n"}, ["a=1"], "which cosmos-rl does not read"),
    ({"w.toml": "[train]\n"}, ["a=1"], "`a=1` is a word of Hydra, which does not read TOML"),
    ({"w.yaml": "a: 1\n"}, ["a=1,2"], "the commas start up to 2 jobs"),
]


@pytest.mark.parametrize(("files", "words", "message"), FAULTS, ids=[message[:30] for _, _, message in FAULTS])
def test_what_cannot_be_read_is_named(tmp_path: Path, files: dict[str, str], words: list[str], message: str) -> None:
    path = [write(tmp_path / name, text) for name, text in files.items()][-1]
    (problem,) = refused(convert, path, request=ConversionRequest(words))
    assert message in problem.message


def test_jobs_of_other_systems_are_those_of_the_files_that_they_name(tmp_path: Path) -> None:
    from tests.convert.files import COSMOS, ROLL

    def named(path: Path) -> dict[str, Any]:
        return convert(path).config

    write(tmp_path / "conf/base.yaml", ROLL[1].read_text())
    write(tmp_path / "conf/job.yaml", "defaults: [base, _self_]\n")
    words = write(tmp_path / "w.txt", "examples/start_rlvr_pipeline.py\n--config_path\nconf\n--config_name\njob\n")
    assert named(words) == named(ROLL[1])
    changed = convert(words, request=ConversionRequest(["seed=77"]))
    assert value_of(changed, "train.seed") == 77
    write(tmp_path / "c.toml", COSMOS[0].read_text())
    assert named(write(tmp_path / "c.txt", "cosmos-rl\n--config=c.toml\n")) == named(COSMOS[0])
