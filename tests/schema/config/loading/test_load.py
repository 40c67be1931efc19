"""Loading: every fault is named at once, with its place and a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schema.config import Config, ConfigError, Problem, check_config, load_config
from schema.config.availability import UNAVAILABLE, Unavailable
from schema.config.problem import format_key
from tests.schema.config_samples import GRPO, SFT, changed, refused, write

HEAD = """\
[train]
compile = false
{train}

[train.train_policy]
reward_function = "boxed_math"
response_column_name = "answer"
{policy}

[train.train_policy.dataset]
name = "synthetic:addition"

[policy]
model_name_or_path = "Qwen/Qwen3-0.6B"
parallelism.tp_size = 1

[rollout]
backend = "transformers"
parallelism = {{ tp_size = 1 }}
{rest}
"""


def text(train: str = "", policy: str = "", rest: str = "") -> str:
    return HEAD.format(train=train, policy=policy, rest=rest)


def load(tmp_path: Path, content: str, *overrides: str) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(content, encoding="utf-8")
    return load_config(file, overrides)


def faults(tmp_path: Path, content: str, *overrides: str) -> dict[str, Problem]:
    return {problem.key: problem for problem in refused(load, tmp_path, content, *overrides)}


def only(tmp_path: Path, content: str, *overrides: str) -> Problem:
    (problem,) = faults(tmp_path, content, *overrides).values()
    return problem


def test_a_sound_file_loads(tmp_path: Path) -> None:
    config = load(tmp_path, text(train="optm_lr = 1", rest="[custom]\nmine = [1, {a = true}]"))
    assert config.train.optm_lr == 1
    assert config.custom == {"mine": [1, {"a": True}]}
    assert config.groups_per_step == 1
    assert config.staleness_bound == 4


@pytest.mark.parametrize(
    ("content", "line", "hint"),
    [
        ("[train]\ncompile = False\n", 2, "TOML writes false"),
        ("[train]\nseed = null\n", 2, "leave the key out"),
        ("[train]\nepoch: 3\n", 2, "key = value"),
        ("[train]\n\noutput_dir = ./outputs\n", 3, 'a string needs quotes: "./outputs"'),
        ("[train\n", 1, ""),
        ('[train]\noutput_dir = "unfinished', 2, ""),
    ],
)
def test_broken_toml_names_line_and_remedy(tmp_path: Path, content: str, line: int, hint: str) -> None:
    problem = only(tmp_path, content)
    assert problem.line == line
    assert problem.column
    assert problem.message.startswith("broken TOML: ")
    assert hint in problem.hint


def test_a_key_twice(tmp_path: Path) -> None:
    assert only(tmp_path, "[train]\nepoch = 1\nepoch = 2\n").line == 3


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("optm_lrr = 1e-6", "did you mean `optm_lr`?"),
        ("optm-lr = 1e-6", "did you mean `optm_lr`?"),
        ("n_generation = 4", "`n_generation` belongs to [rollout] or [validation]"),
        ("max_respons_length = 5", "did you mean `rollout.max_response_length`?"),
        ("redis = 5", "`redis` is a section of its own: [redis]"),
        ("zzzz = 1", "known here: optm_name"),
    ],
)
def test_unknown_keys_get_a_suggestion(tmp_path: Path, line: str, hint: str) -> None:
    problem = only(tmp_path, text(train=line))
    assert problem.message == "unknown key"
    assert problem.hint.startswith(hint)
    assert (problem.line, problem.column) == (3, 1)


def test_unknown_section(tmp_path: Path) -> None:
    problem = only(tmp_path, text(rest="[rolout]\nx = 1"))
    assert (problem.key, problem.hint) == ("rolout", "did you mean `rollout`?")


def test_keys_of_the_other_algorithm(tmp_path: Path) -> None:
    problem = only(tmp_path, text(policy='conversation_column_name = "x"'))
    assert problem.hint == '`conversation_column_name` belongs to type = "sft"'
    data = changed(SFT, train__train_policy__epsilon_low=0.1)
    with pytest.raises(ConfigError, match='`epsilon_low` belongs to type = "grpo"'):
        check_config(data)


@pytest.mark.parametrize(
    ("line", "key", "message", "hint"),
    [
        ("epoch = 'abc'", "epoch", "expected an integer, got the string 'abc'", "Passes over"),
        ("epoch = '3'", "epoch", "expected an integer, got the string '3'", "without quotes: epoch = 3"),
        ("epoch = 2.0", "epoch", "expected an integer, got the number 2.0", "write epoch = 2"),
        ("epoch = 2.5", "epoch", "expected an integer, got the number 2.5", ""),
        ("epoch = true", "epoch", "expected an integer, got true", ""),
        ("epoch = []", "epoch", "expected an integer, got a list", ""),
        ("epoch = {}", "epoch", "expected an integer, got a table", ""),
        ("epoch = 2026-01-01", "epoch", "expected an integer, got the date or time 2026-01-01", ""),
        ("epoch = 0", "epoch", "must be at least 1, got 0", ""),
        ("epsilon = true", "epsilon", "expected a number, got true", ""),
        ("epsilon = nan", "epsilon", "must be a finite number, got nan", ""),
        ("epsilon = inf", "epsilon", "must be a finite number, got inf", ""),
        ("epsilon = 0.0", "epsilon", "must be more than 0.0, got 0.0", ""),
        (
            "deterministic = 'true'",
            "deterministic",
            "expected true or false, got the string 'true'",
            "without quotes",
        ),
        ("deterministic = 1", "deterministic", "expected true or false, got the integer 1", ""),
        ("output_dir = 3", "output_dir", "expected a string, got the integer 3", 'output_dir = "3"'),
        ("output_dir = ''", "output_dir", "must not be empty", ""),
        ("optm_lr = '1e-6'", "optm_lr", "expected a number or a list of numbers, got the string '1e-6'", "= 1e-6"),
        ("optm_lr = [1, 'a']", "optm_lr[1]", "expected a number, got the string 'a'", ""),
        ("optm_lr = -1", "optm_lr", "must be at least 0.0, got -1", ""),
        ("optm_betas = [0.9]", "optm_betas", "must have 2 items, got 1", ""),
        ("optm_betas = [0.9, 1.0]", "optm_betas[1]", "must be less than 1.0, got 1.0", ""),
        ("optm_warmup_steps = 'x'", "optm_warmup_steps", "expected a number, got the string 'x'", ""),
        ("resume = 1", "resume", "expected true or false or a string, got the integer 1", ""),
        ("ckpt = 3", "ckpt", "expected a table, got the integer 3", "[train.ckpt]"),
        ("ckpt.max_keep = 0", "ckpt.max_keep", "must be -1 or at least 1, got 0", ""),
        (
            "ckpt.upload_s3 = 'x'",
            "ckpt.upload_s3",
            'expected true or false, "final" or "all", got the string \'x\'',
            "",
        ),
        ("param_dtype = 'bfloat'", "param_dtype", "got the string 'bfloat'", 'did you mean "bfloat16"?'),
        ("optm_impl = ['fuse']", "optm_impl[0]", "got the string 'fuse'", 'did you mean "fused"?'),
        ("timestamp = '../x'", "timestamp", "does not have the form", ""),
    ],
)
def test_types_and_bounds_in_the_users_words(tmp_path: Path, line: str, key: str, message: str, hint: str) -> None:
    problem = only(tmp_path, text(train=line))
    assert problem.key == f"train.{key}"
    assert message in problem.message
    assert hint in problem.hint
    assert problem.line == 3


def test_engines_that_are_not_built_name_the_alternative(tmp_path: Path) -> None:
    for engine in ("sglang", "trtllm"):
        problem = only(tmp_path, text().replace('"transformers"', f'"{engine}"'))
        assert problem.message == f'"{engine}" is not available'
        assert '"vllm"' in problem.hint


def test_unknown_algorithm(tmp_path: Path) -> None:
    problem = only(tmp_path, text(policy='type = "sfft"\nepsilon_lo = 1'))
    assert problem.key == "train.train_policy.type"
    assert problem.message == 'expected "grpo" or "sft", got the string \'sfft\''
    assert problem.hint == 'did you mean "sft"?'
    assert problem.line == 8
    assert only(tmp_path, text(policy="type = 3")).message.endswith("got the integer 3")
    assert only(tmp_path, text(policy="type = []")).message.endswith("got a list")
    assert only(tmp_path, "train = {train_policy = 3, compile = false}\n[policy]\nparallelism.tp_size = 1").key == (
        "train.train_policy"
    )


def test_all_problems_at_once_in_file_order(tmp_path: Path) -> None:
    content = text(
        train="epoch = 'x'\noptm_lrr = 1\noptm_betas = ['a', 'b']",
        policy="advantage_estimator = 'gae'\non_policy = true\nallowed_outdated_steps = 2",
        rest="n_generation = 7\n[custom]\nx = inf",
    )
    found = faults(tmp_path, content)
    assert list(found) == [
        "train.train_batch_per_replica",
        "train.epoch",
        "train.optm_lrr",
        "train.optm_betas[0]",
        "train.optm_betas[1]",
        "train.train_policy.advantage_estimator",
        "train.train_policy.on_policy",
        "custom",
    ]
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, content)
    blocks = caught.value.render().split("\n")
    file = tmp_path / "run.toml"
    assert blocks[2:4] == [
        f"{file}:3:1: train.epoch: expected an integer, got the string 'x'",
        "    train.epoch: Passes over the dataset.",
    ]
    assert str(caught.value) == caught.value.render()


def test_a_fault_has_no_echo(tmp_path: Path) -> None:
    problem = only(tmp_path, text(rest="n_generation = 'many'", train="train_batch_per_replica = 9"))
    assert problem.key == "rollout.n_generation"


def test_position_of_what_is_not_written_is_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(UNAVAILABLE, "train.compile", Unavailable((False,), "torch.compile"))
    content = text().replace("compile = false", "")
    problem = only(tmp_path, content)
    assert (problem.key, problem.line, problem.column) == ("train.compile", 1, 1)
    assert problem.hint == "write train.compile = false"
    assert "the default" in problem.message


POSITIONS = """\
top = 1
[train]  # comment = "[x]"
'epoch' = 2
  output_dir = \"\"\"a
# b = 1
\"\"\"
a.b . "c d" = [1, # two ]
   2, {x = "}", y.z = 3 }]
[[custom.list]]
k = 'it''s' # no
[custom.list.sub]
s = '''
['''
[[custom.list]]
k = 1979-05-27 07:32:00
"""


def test_positions_of_everything() -> None:
    from schema.config.loading.positions import locate

    found = locate(POSITIONS.replace("'it''s'", '"it\\"s"'))
    assert {format_key(path): place for path, place in found.items()} == {
        "top": (1, 1),
        "train": (2, 1),
        "train.epoch": (3, 1),
        "train.output_dir": (4, 3),
        "train.a": (7, 1),
        "train.a.b": (7, 1),
        'train.a.b."c d"': (7, 1),
        'train.a.b."c d"[0]': (7, 16),
        'train.a.b."c d"[1]': (8, 4),
        'train.a.b."c d"[2]': (8, 7),
        'train.a.b."c d"[2].x': (8, 8),
        'train.a.b."c d"[2].y': (8, 17),
        'train.a.b."c d"[2].y.z': (8, 17),
        "custom": (9, 1),
        "custom.list": (9, 1),
        "custom.list[0]": (9, 1),
        "custom.list[0].k": (10, 1),
        "custom.list[0].sub": (11, 1),
        "custom.list[0].sub.s": (12, 1),
        "custom.list[1]": (14, 1),
        "custom.list[1].k": (15, 1),
    }


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("train.epoch=3", "train.epoch", 3),
        ("train.output_dir=runs/a", "train.output_dir", "runs/a"),
        ("train.output_dir = 'runs/b'", "train.output_dir", "runs/b"),
        ("train.optm_lr=[1e-4]", "train.optm_lr", [1e-4]),
        ("train.deterministic=true", "train.deterministic", True),
        ("custom.x=a=b", "custom.x", "a=b"),
        ("custom.x=1\ny=2", "custom.x", "1\ny=2"),
        ('custom."a.b"=1', "custom", {"a.b": 1}),
    ],
)
def test_overrides(tmp_path: Path, override: str, path: str, value: Any) -> None:
    found: Any = load(tmp_path, text(), override)
    for part in path.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == value


def test_faults_of_overrides_name_the_override(tmp_path: Path) -> None:
    problem = only(tmp_path, text(train="epoch = 2"), "train.epoch=abc")
    assert problem.render().startswith("--set train.epoch=abc: train.epoch: expected an integer")
    assert only(tmp_path, text(), "custom.x=nan").file == "--set custom.x=nan"
    assert "dotted.key=value" in only(tmp_path, text(), "nonsense").message
    assert "dotted.key=value" in only(tmp_path, text(), "=3").message
    assert only(tmp_path, text(train="epoch = 2"), "train.epoch.x=3").message == "train.epoch is not a table"
    assert only(tmp_path, text(), "train.epohc=3").hint == "did you mean `epoch`?"


def test_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    data = changed(
        GRPO,
        train__train_policy__on_policy=True,
        train__train_policy__reward_function={"boxed_math": 1.0, "format": 0.2},
        rollout__sampling_config__temperature=0.7,
        rollout__sampling_config__stop=['a"\\\n\x7f\u2028'],
        custom={"k.k": {"x": [1, {"y": {}, "z": -0.0}]}, "big": 2**70, "tiny": 1e-300},
    )
    config = check_config(data)
    again = load(tmp_path, config.to_toml())
    assert again.to_dict() == config.to_dict()
    assert again.staleness_bound == config.staleness_bound == 0
    assert again.grpo.temperature == again.sampling_temperature == 0.7
    assert check_config(config.to_dict()) == Config.model_validate(config.to_dict())
    with pytest.raises(TypeError, match="NoneType"):
        Config(custom={"x": [None]}).to_toml()


def test_values_that_follow_from_others() -> None:
    config = check_config(changed(GRPO, train__train_batch_per_replica=32, rollout__n_generation=8))
    assert (config.groups_per_step, config.samples_per_step) == (4, 32)
    assert config.effective_seed == config.engine_seed == config.sampling_seed == 42
    assert config.engine_max_len == 4096
    assert config.train.effective_transfer_dtype == "bfloat16"
    assert config.validation_rewards == {"": {"boxed_math": 1.0}}
    seeded = changed(GRPO, train__seed=0, rollout__sampling_config__seed=7)
    config = Config.model_validate(seeded)
    assert (config.effective_seed, config.engine_seed, config.sampling_seed) == (0, 0, 7)
    with pytest.raises(TypeError, match="no SFT section"):
        _ = config.sft
    with pytest.raises(TypeError, match="no GRPO section"):
        _ = check_config(SFT).grpo


def test_written_values_stay_as_written() -> None:
    data: dict[str, Any] = {}
    write(data, ("train", "train_policy", "reward_function"), ["format", "gsm8k"])
    config = Config.model_validate(data)
    assert config.grpo.reward_function == ["format", "gsm8k"]
    assert config.grpo.reward_weights == {"format": 1.0, "gsm8k": 1.0}
    assert config.grpo.model_fields_set == {"reward_function"}
