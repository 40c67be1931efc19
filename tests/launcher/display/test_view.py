"""What is shown of a status: pure text."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from launcher.display.screen import Screen
from launcher.display.view import LINE_EVERY, SIGN_OF_LIFE, LinePacer, View, duration, line, panel, sparkline
from schema.wire.messages import Phase
from tests.launcher.samples import held_out_loss, job_status, validation


def drawn(view: View) -> str:
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(panel(view))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_line_has_every_figure():
    view = View(status=job_status(validation=validation(10, 0.875)), bound=4)
    assert line(view) == (
        "phase=training step=12/60 reward=0.513 held_out=0.875 staleness=1.2/3/4 samples_per_s=351.2 "
        "tokens_per_s=9121 queue=7 replicas=1policy+2rollout idle_policy=3% idle_rollout=8% eta=42s"
    )


def test_supervised_training_shows_the_held_out_loss():
    status = job_status(mode="sft", reward=None, validation=held_out_loss(10, 1.25))
    view = View(status=status, first_held_out=3.5)
    assert "held_out=1.25" in line(view)
    assert "loss 1.250, accuracy 0.500 at version 10  (before: 3.500)" in drawn(view)
    text = line(View(status=job_status(mode="sft", reward=None, staleness_mean=None)))
    assert "loss=0.250" in text
    assert not [word for word in ("staleness", "queue", "reward") if word in text]


def test_a_line_before_the_first_status_names_the_stage():
    assert line(View(stage="preparing data", elapsed=3.4)) == 'phase=starting stage="preparing data" elapsed=3s'


def test_errors_and_a_silent_controller_are_in_the_line():
    text = line(View(status=job_status(last_error="reward boxed_math: timed out"), reachable=False))
    assert 'error="reward boxed_math: timed out"' in text
    assert "controller=unreachable" in text


def test_a_redis_that_hangs_is_shown_and_the_controller_is_not_blamed():
    view = View(status=job_status(), redis="hung", refusal="Redis does not take writes: Timeout")
    assert 'redis=hung controller="Redis does not take writes: Timeout"' in line(view)
    assert "does not answer" in drawn(view)
    assert "cannot serve now, the workers keep trying: Redis does not take writes" in " ".join(drawn(view).split())
    assert "unreachable" not in line(view)


def test_those_who_train_together_are_shown():
    members = {
        "epoch": 7, "parts": 3, "waiting": ["policy-2.4"],
        "members": [
            {"replica_id": "policy-1.2", "parts": 2, "seconds": 0.5},
            {"replica_id": "policy-0.1", "parts": 1, "seconds": 0.9},
        ],
    }  # fmt: skip
    text = "policy-1.2 2 of 3 parts (leads), policy-0.1 1 of 3 parts; policy-2.4 from one of the next steps on"
    view = View(status=job_status(members=members))
    assert f'trainers="{text}  (epoch 7)"' in line(view)
    assert "trainers" in drawn(view)
    assert "trainers" not in line(View(status=job_status()))


def test_the_panel_has_every_figure():
    view = View(
        status=job_status(validation=validation(10, 0.875), last_error="[bold]odd[/] text"),
        bound=4,
        rewards=[0.1, 0.2, 0.5],
        first_held_out=0.31,
        processes={"redis": "up", "rollout-0": "waiting (1 restarts)"},
        log_dir="/runs/1/logs",
        elapsed=20.0,
    )
    text = drawn(view)
    for part in (
        "training", "12/60", "42s left", "0.513", "▁", "█", "0.875 at version 10", "before: 0.310",
        "1.2 · 3 · 4", "351.2 samples/s", "9121 tokens/s", "1 policy, 2 rollout", "policy 3%, rollout 8%",
        "7 ready, 20 outstanding", "rollout-0 waiting (1 restarts)", "[bold]odd[/] text", "/runs/1/logs",
    ):  # fmt: skip
        assert part in text, part


def test_the_panel_shows_the_stage_and_notices():
    assert "preparing data: 40%" in drawn(View(stage="preparing data: 40%"))
    assert "waiting for policy-0" in drawn(View(status=job_status(), notice="waiting for policy-0"))
    held_up = View(status=job_status(note="rewards time out"))
    assert "rewards time out" in drawn(held_up)
    assert 'note="rewards time out"' in line(held_up)


def test_lines_are_paced_by_steps_phases_and_time():
    pacer, view = LinePacer(), View(status=job_status(step=1))
    assert pacer.due(view, 0.0)
    assert not pacer.due(view, 5.0), "nothing has changed"
    view.status = job_status(step=2)
    assert pacer.due(view, 5.0)
    view.status = job_status(step=3)
    assert not pacer.due(view, 5.0 + LINE_EVERY / 2), "steps faster than a line each are skipped"
    assert pacer.due(view, 5.0 + LINE_EVERY)
    view.status = job_status(step=3, phase=Phase.FINISHED)
    assert pacer.due(view, 5.1 + LINE_EVERY), "a new phase is shown at once"
    assert not pacer.due(view, 5.0 + SIGN_OF_LIFE)
    assert pacer.due(view, 5.2 + LINE_EVERY + SIGN_OF_LIFE), "a sign of life"


def test_progress_within_a_stage_is_not_a_new_phase():
    pacer = LinePacer()
    assert pacer.due(View(stage="preparing data: 10%"), 0.0)
    assert not pacer.due(View(stage="preparing data: 20%"), 0.1)
    assert pacer.due(View(stage="starting the controller"), 0.2)


def test_sparkline():
    assert sparkline([], 5) == ""
    assert sparkline([1.0, 1.0], 5) == "▁▁"
    assert sparkline([0.0, 0.5, 1.0], 5) == "▁▅█"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_a_sparkline_fits_its_width(values: list[float], width: int):
    assert 1 <= len(sparkline(values, width)) <= width


def test_durations():
    assert [duration(s) for s in (0.2, 48, 187, 7500, 273_600)] == ["0s", "48s", "3m07s", "2h05m", "3d04h"]


def test_plain_lines_begin_with_the_time_of_day(capsys: pytest.CaptureFixture[str]):
    Screen().show(View(stage="waiting for replicas"))
    assert re.fullmatch(
        r'\d\d:\d\d:\d\d phase=starting stage="waiting for replicas" elapsed=0s\n', capsys.readouterr().out
    )
