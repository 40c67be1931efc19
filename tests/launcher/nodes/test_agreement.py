"""What machines must have alike, and what is said where they differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.errors import LaunchError
from launcher.nodes.agreement import CLOCK_TOLERANCE, clocks_apart, difference, facts
from launcher.nodes.announcement import DEFAULT_PORT, HeadAddress
from tests.launcher.samples import config

OURS = {"code": "1", "python": "3.11.7", "torch": "2.13.0", "model": "m", "file /r.py": "f", "train.seed": "s"}


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"code": "2"}, "its code of cosmos-launch is another one"),
        ({"torch": "2.12.0"}, "torch is 2.12.0 there and 2.13.0 on the head"),
        ({"model": "absent"}, "policy.model_name_or_path holds another model there"),
        ({"file /r.py": "g"}, "/r.py differs there"),
        ({"train.seed": "t", "train.epoch": "1"}, "its configuration differs in train.seed, train.epoch"),
    ],
)
def test_a_difference_is_named_with_a_remedy(theirs: dict[str, str], said: str) -> None:
    found, remedy = difference(OURS, {**OURS, **theirs})
    assert found == said
    assert remedy
    assert difference(OURS, OURS) == ("", "")


def test_many_differences_are_counted() -> None:
    theirs = OURS | {f"train.key_{number}": "x" for number in range(9)}
    found, _ = difference(OURS, theirs)
    assert found.endswith("train.key_4 and 4 more"), found


def test_clocks_may_differ_a_little() -> None:
    assert clocks_apart(1000.0, 1000.0 - CLOCK_TOLERANCE) == ""
    assert clocks_apart(1000.0, 1040.0) == "its clock is 40 s ahead of that of the head"
    assert clocks_apart(1000.0, 960.0) == "its clock is 40 s behind that of the head"


def test_facts_follow_configuration_model_and_own_code(tmp_path: Path) -> None:
    model, reward = tmp_path / "model", tmp_path / "reward.py"
    model.mkdir()
    shape = {"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1}
    shape |= {"intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    (model / "config.json").write_text(json.dumps(shape))
    reward.write_text("def f(): ...")

    def here(**train: object) -> dict[str, str]:
        scores = {"train_policy": {"variant": f"{reward}:f"}}
        return facts(config(train=scores | train, policy={"model_name_or_path": str(model)}), {})

    before = here()
    assert difference(before, here()) == ("", "")
    assert "train.seed" in difference(before, here(seed=7))[0]
    reward.write_text("def f(): pass")
    assert difference(before, here())[0] == f"{reward} differs there"
    reward.write_text("def f(): ...")
    (model / "config.json").write_text(json.dumps(shape | {"vocab_size": 9}))
    assert "another model" in difference(before, here())[0]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node-0", "node-0", DEFAULT_PORT),
        ("10.0.0.1:29700", "10.0.0.1", 29700),
        ("[fd00::1]:7", "fd00::1", 7),
        ("fd00::1", "fd00::1", DEFAULT_PORT),
    ],
)
def test_addresses_of_heads(text: str, host: str, port: int) -> None:
    assert HeadAddress.parse(text) == HeadAddress(host, port)


@pytest.mark.parametrize("text", ["", "a b", "host:", "host:0", "host:70000", "[fd00::1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="is not an address"):
        HeadAddress.parse(text)


def test_an_address_is_here_or_not() -> None:
    assert HeadAddress("127.0.0.1", 1).is_here()
    assert not HeadAddress("192.0.2.1", 1).is_here(), "of a network for documentation"
    with pytest.raises(LaunchError, match="cannot be resolved"):
        HeadAddress("no-such-host.invalid", 1).is_here()
