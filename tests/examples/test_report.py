"""The table and the curve say what the summary of the run says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report import Phase, Story, print_story
from try_model import Answer, Comparison, boxed

from schema.wire.messages import JobStatus, LedgerStatus, StepRecord, ValidationRecord


def summary(steps: int = 5) -> dict:
    """A summary of a run of 10 samples and 300 tokens a step, one step every half second, from t = 1000."""
    metrics = {"sampled": 10.0, "tokens": 300.0, "response_tokens_mean": 30.0, "staleness_mean": 0.5}
    records = [
        StepRecord(step=i, at=1000 + i / 2, metrics={**metrics, "reward_mean": i / steps, "staleness_max": 1.0})
        for i in range(steps)
    ]
    status = JobStatus(
        job_id="j", name="n", mode="grpo", phase="finished", step=steps, total_steps=steps, timeline=0,
        version=steps, publication=steps + 1, started_at=990.0, first_step_at=1000.0, updated_at=1003.0,
        samples_per_s=1.0, tokens_per_s=1.0, eta_s=None, reward=0.8, validation=None, staleness_mean=0.5,
        staleness_max=1, queue_ready=0, outstanding=0, replicas={}, idle={"policy": 0.05, "rollout": 0.2},
        metrics={}, last_error=None,
    )  # fmt: skip
    ledger = LedgerStatus(
        created=50, states={"trained": 50}, dropped={}, staleness={0: 25, 1: 25}, max_staleness=1, bound=2
    )
    validations = [
        ValidationRecord(
            version=version, at=1.0, samples=200, score_mean=score, rewards_mean={}, response_tokens_mean=tokens
        )
        for version, score, tokens in ((4, 0.9, 31.0), (0, 0.3, 22.0), (2, 0.6, 28.0))
    ]
    return {
        "status": status.model_dump(mode="json"),
        "ledger": ledger.model_dump(mode="json"),
        "steps": [record.model_dump(mode="json") for record in records],
        "validations": [record.model_dump(mode="json") for record in validations],
    }


@pytest.fixture
def grpo(tmp_path: Path) -> Phase:
    (tmp_path / "summary.json").write_text(json.dumps(summary()))
    return Phase.read(tmp_path, 985.0, 1005.0)


@pytest.fixture
def story(grpo: Phase, tmp_path: Path) -> Story:
    return Story(4.0, Phase(tmp_path, 950.0, 984.0, {}), grpo, 0.005, 61.0)


def test_the_table_tells_the_run(story: Story):
    rows = dict(story.rows())
    assert rows["held-out accuracy, untrained"] == "0.5%"
    assert rows["  after the warm start (SFT)"] == "30.0%"
    assert rows["  during reinforcement"] == "60% (step 2)"
    assert rows["  after reinforcement (GRPO)"] == "90.0%"
    assert rows["response length"] == "22.0 → 31.0 tokens"
    assert rows["speed"] == "20 samples/s, 600 response tokens/s", (
        "40 samples in the 2 s between first and last commit"
    )
    assert rows["idle"] == "trainer 5.0%, generator 20.0%"
    assert rows["staleness"] == "at most 1 steps, bound 2"
    assert rows["first GRPO step"] == "16.0 s after the warm start"
    assert rows["time"] == "model 4 s, warm start 34 s, reinforcement 20 s, all 61 s"


def test_everything_is_printed(story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    answers = [
        Answer("What is 1 + 2?", "3", "\\boxed{4}", "<think>1+2=3</think>\\boxed{3}"),
        Answer("What is 5 + 5?", "10", "", "\\boxed{11}"),
    ]
    print_story(story, Comparison(0.005, answers), tmp_path / "curve.png")
    shown = capsys.readouterr().out
    assert "<think>1+2=3</think>" in shown
    assert "wrong: 10" in shown
    assert str(tmp_path / "curve.png") in shown.replace("\n", "")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("\\boxed{633}", True),
        ("\\boxed{1} no: \\boxed{633}", True),
        ("\\boxed{633} \\boxed{1}", False),
        ("633", False),
        ("\\boxed{633", False),
    ],
)
def test_the_last_box_counts(text: str, right: bool):
    assert boxed(text, "633") is right
