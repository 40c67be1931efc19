"""Keys that no rule knows: refused where they may decide what is trained, unless they are accepted by name."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from convert import convert_text
from convert.engine.model import Conversion, Outcome
from convert.engine.write import to_json, to_report, to_toml
from schema.config import ConfigError, check_config
from tests.convert.files import nest, yaml_text
from tests.schema.config_samples import refused

_VERL = "algorithm: {adv_estimator: grpo}\n"
_SFT = "data: {train_files: x.parquet}\nmodel: {path: m}\noptim: {lr: 1e-5}\n"
_ROLL = "pretrain: m\nrollout_batch_size: 8\nadv_estimator: grpo\n"
_COSMOS = "[policy]\nmodel_name_or_path = 'm'\n[train.train_policy]\ntype = 'grpo'\n"


def _with(base: str, key: str, value: object) -> tuple[str, str]:
    """A file with one key more, and the key."""
    return base + yaml_text(nest({key: value})), key


REFUSED = {
    "verl algorithm": _with(_VERL, "actor_rollout_ref.actor.sft_loss_coef", 0.1),
    "verl rollout": (_VERL + "actor_rollout_ref: {rollout: {n_agent: 5}}", "actor_rollout_ref.rollout.n_agent"),
    "verl reference": (_VERL + "actor_rollout_ref: {ref: {mixing: 0.5}}", "actor_rollout_ref.ref.mixing"),
    "verl critic": (_VERL + "critic: {target_tau: 0.5}", "critic.target_tau"),
    "verl data": (_VERL + "data: {reweight_column: w}", "data.reweight_column"),
    "verl reward": (_VERL + "reward: {length_bonus: 0.5}", "reward.length_bonus"),
    "verl reward model": (_VERL + "reward_model: {format_coef: 0.5}", "reward_model.format_coef"),
    "a key of a fork": (_VERL + "do_search: true", "do_search"),
    "a table of a fork": (_VERL + "retriever: {url: x}", "retriever.url"),
    "words of a command line": (_VERL + "+algorithm.mine: 1", '"+algorithm.mine"'),
    "a fork's trainer": (_VERL + "trainer: {rejection_sample: true}", "trainer.rejection_sample"),
    "a fork's samples": (_VERL + "trainer: {use_log_prob_filter: true}", "trainer.use_log_prob_filter"),
    "a fork's asynchronous trainer": (_VERL + "async_training: {min_ess: 1.1}", "async_training.min_ess"),
    "a fork's sampler": (_VERL + "trainer: {v1: {sampler: {tau: 8}}}", "trainer.v1.sampler.tau"),
    "another engine": _with(_VERL, "actor_rollout_ref.actor.torchtitan.mine", 1),
    "a fork's SFT trainer": (_SFT + "trainer: {dynamic_sampling: true}", "trainer.dynamic_sampling"),
    "a fork's loss": (_SFT + "loss: {focal_gamma: 2}", "loss.focal_gamma"),
    "a fork's adapters": (_SFT + "lora: {r: 8}", "lora.r"),
    "an unknown table": (_VERL + "grpo: {beta: 0.1}", "grpo.beta"),
    "a table in the wrong place": (_VERL + "actor: {clip_ratio: 0.1}", "actor.clip_ratio"),
    "a misspelt table": (_VERL + "algoritm: {lam: 0.9}", "algoritm.lam"),
    "off may be the change": ("algorithm: {adv_estimator: grpo, norm_by_length: false}", "algorithm.norm_by_length"),
    "zero may be the change": ("algorithm: {adv_estimator: grpo, smoothing: 0}", "algorithm.smoothing"),
    "below a table of its own": ("algorithm: {adv_estimator: grpo, mine: {deep: {x: 1}}}", "algorithm.mine.deep.x"),
    "a list": ("algorithm: {adv_estimator: grpo, sources: [a, b]}", "algorithm.sources"),
    "a value that is not understood": _with(_VERL, "actor_rollout_ref.actor.optim.lr", "fast"),
    "another class": ("algorithm: {adv_estimator: grpo, _target_: mine.Config}", "algorithm._target_"),
    "verl SFT's data": (_SFT.replace("{train", "{reweight: true, train"), "data.reweight"),
    "verl SFT's optimizer": (_SFT.replace("{lr", "{layer_decay: 0.9, lr"), "optim.layer_decay"),
    "ROLL's top": (_ROLL + "sft_loss_coef: 0.1", "sft_loss_coef"),
    "ROLL's actor": _with(_ROLL, "actor_train.training_args.layer_decay", 0.9),
    "ROLL's engine": (_ROLL + "actor_infer: {generating_args: {n_agent: 5}}", "actor_infer.generating_args.n_agent"),
    "ROLL's rewards": (
        _ROLL + "rewards: {math: {mine: 1, worker_cls: roll.MathRuleRewardWorker}}",
        "rewards.math.mine",
    ),
    "ROLL, a name within a text": (_ROLL + "coef: 0.1\nexp_name: run-${coef}", "coef"),
    "cosmos-rl's train": (_COSMOS + "samples_reweight = true", "train.train_policy.samples_reweight"),
    "cosmos-rl's rollout": (_COSMOS + "[rollout]\nn_agent = 5", "rollout.n_agent"),
    "cosmos-rl's policy": (_COSMOS + "[policy.mine]\nx = 1", "policy.mine.x"),
    "cosmos-rl's validation": (_COSMOS + "[validation]\nn_agent = 5", "validation.n_agent"),
}


def convert(text: str, *accepted: str) -> Conversion:
    """The conversion of a text of any of the systems."""
    return convert_text(text, "run.toml" if text.startswith("[") else "run.yaml", None, None, accepted)


@pytest.mark.parametrize(("text", "key"), REFUSED.values(), ids=REFUSED)
def test_in_a_table_that_decides_what_is_trained_an_unknown_key_is_refused(text: str, key: str) -> None:
    found = convert(text)
    assert list(found.unsupported) == [key]
    assert not found.entry(key).understood
    assert tomllib.loads(to_toml(found)) == found.config
    with pytest.raises(ConfigError) as error:
        check_config(found.config)
    assert any(key in problem.message for problem in error.value.problems)
    report = to_report(found, full=False).splitlines()
    heading = next(line for line in report if line.startswith("unsupported: not understood"))
    assert "--allow-unknown" in heading
    assert key in report[report.index(heading) + 1]

    accepted = convert(text, key)
    assert not accepted.unsupported
    assert accepted.entry(key).outcome is Outcome.ACCEPTED
    comments = [line for line in to_toml(accepted).splitlines() if line.startswith("#")]
    assert any("accepted by name" in line for line in comments)
    assert any(key in line for line in comments)


LISTED = {
    "verl's trainer": (_VERL + "trainer: {wandb_proxy: x}", "trainer.wandb_proxy"),
    "verl's validation": (_SFT + "trainer: {validate_before_training: false}", "trainer.validate_before_training"),
    "a table of a cluster": (_VERL + "slurm: {partition: x}", "slurm.partition"),
    "a table of its own": (_VERL + "notes: {x: 1}", "notes.x"),
    "a value at the top of verl": (_VERL + "my_batch: 8", "my_batch"),
    "nothing": ("algorithm: {adv_estimator: grpo, mine: null}", "algorithm.mine"),
    "an empty table": ("algorithm: {adv_estimator: grpo, mine: {}}", "algorithm.mine"),
    "verl's logging": (_VERL + "global_profiler: 3", "global_profiler"),
    "ROLL, a value that others refer to": (_ROLL + "gpus: 8\nnum_gpus_per_node: ${gpus}", "gpus"),
    "ROLL, a text within texts": (_ROLL + "root: /x\noutput_dir: ${root}/out", "root"),
    "ROLL, a value with an alias": (_ROLL + "gpus: &gpus 8\nnum_gpus_per_node: *gpus", "gpus"),
    "ROLL, a table of its own": (_ROLL + "shared: &shared {x: 1}\nactor_train: {training_args: {}}", "shared.x"),
    "a table of anchors": (_VERL + "_data: &d {nnodes: 2}\ntrainer: {<<: *d}", "_data.nnodes"),
    "ROLL's tracker": (_ROLL + "track_with: mine", "track_with"),
    "cosmos-rl's logging": (_COSMOS + "[logging]\nmine = 1", "logging.mine"),
    "cosmos-rl, a table of its own": (_COSMOS + "[mine]\nx = 1", "mine.x"),
}


@pytest.mark.parametrize(("text", "key"), LISTED.values(), ids=LISTED)
def test_elsewhere_an_unknown_key_is_listed(text: str, key: str) -> None:
    found = convert(text)
    assert not found.unsupported
    assert [entry.source for entry in found.of(Outcome.UNKNOWN)] == [key]
    assert f"{key} = " in to_report(found, full=False).partition("unknown:")[2]


HYDRA = {
    "verl": "algorithm: {adv_estimator: grpo, _target_: verl.X, _recursive_: false, _convert_: all, _partial_: true}",
    "ROLL": _ROLL + "actor_train: {_target_: roll.X, _recursive_: false, _convert_: all, _partial_: true}",
}


@pytest.mark.parametrize("text", HYDRA.values(), ids=HYDRA)
def test_what_belongs_to_hydra_is_known(text: str) -> None:
    found = convert(text)
    assert not found.unsupported
    assert not found.of(Outcome.UNKNOWN)


ACCEPTED: dict[str, tuple[str, str, str]] = {
    "a wrong name": ("algorithm.samples_reweigth", "the file has no such key", "`algorithm.samples_reweight`"),
    "the last part alone": ("samples_reweight", "the file has no such key", "`algorithm.samples_reweight`"),
    "another name": ("trainer.quite_another", "the file has no such key", "`algorithm.mine.x`"),
    "a table": ("algorithm.mine", "name each of its keys", "`algorithm.mine.x`"),
    "a key that is understood": ("algorithm.adv_estimator", "it is understood (mapped)", "not understood are"),
    "a part of the method": ("algorithm.use_pf_ppo", "it is understood (unsupported)", "not understood are"),
}


@pytest.mark.parametrize(("name", "message", "hint"), ACCEPTED.values(), ids=ACCEPTED)
def test_only_names_of_keys_that_are_not_understood_are_accepted(name: str, message: str, hint: str) -> None:
    text = "algorithm: {adv_estimator: grpo, use_pf_ppo: true, samples_reweight: true, mine: {x: 1}}"
    (problem,) = refused(convert, text, name)
    assert (problem.key, message in problem.message, hint in problem.hint) == (name, True, True), problem


def test_the_report_lists_all() -> None:
    names = [f"stranger_{index:02}" for index in range(30)]
    text = _VERL + "".join(f"{name}: 1\n" for name in names)
    known = ", ".join(
        f"{name}: null" for name in ("lr", "betas", "weight_decay", "optimizer", "clip_grad", "num_cycles")
    )
    optim = f"{{optim: {{{known}}}}}"
    text += f"actor_rollout_ref: {{actor: {optim}}}\ncritic: {optim}"
    with pytest.raises(ConfigError, match="30 of its 43 keys"):
        convert(text)
    accepted = names[:20]
    report = to_report(convert(text, *accepted), full=False)
    assert all(name in report for name in names)


def test_the_account_says_what_is_not_understood() -> None:
    found: dict[str, Any] = to_json(convert("algorithm: {adv_estimator: grpo, mine: 1, other: 1}", "algorithm.other"))
    understood = {entry["key"]: (entry["outcome"], entry["understood"]) for entry in found["entries"]}
    assert understood == {
        "algorithm.adv_estimator": ("mapped", True),
        "algorithm.mine": ("unsupported", False),
        "algorithm.other": ("accepted", False),
    }
