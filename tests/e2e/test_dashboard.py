"""The dashboard in a real browser: a live run, a paused one and dead ones."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from schema.wire import event_file, sample_file
from schema.wire.messages import Event, SampleRecord
from tests.controller.conftest import Stage, shared_valkey, stage
from tests.controller.drivers import Rollout, train_step
from tests.support.controller import TOKENS, make_config, make_run_dir
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
__all__ = ["shared_valkey", "stage"]

EVIL = '<img src=x onerror="document.title=1"><script>document.title="executed"</script>'
PATIENT = 90
STEPS = 100_000

SHOWN_STEPS = "(([a, b]) => b - a)(document.querySelector('.js-plotly-plot')._fullLayout.xaxis.range)"

HIDE = (
    "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
    "document.dispatchEvent(new Event('visibilitychange'))"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path, "these tests need Chromium: apt-get install --no-install-recommends chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(PATIENT * 1000)
    expect.set_options(timeout=PATIENT * 1000)
    thrown: list[str] = []
    page.on("pageerror", lambda error: thrown.append(str(error)))
    yield page
    page.close()
    assert thrown == []


@pytest.fixture
def dashboard() -> Iterator[object]:
    """Starts the dashboard of run directories; returns its link."""
    started: list[subprocess.Popen[str]] = []

    def start(*runs: Path) -> str:
        command = [sys.executable, "-m", "controller.dashboard", *map(str, runs)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.stdout.readline().strip()

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENT)
        assert (process.returncode, errors) == (0, "")


def dead(directory: Path, steps: int) -> Path:
    """A run that was killed after so many steps; every metric is missing in each third thousand of them."""
    run = make_run_dir(directory, make_config())
    rows = (
        Event(
            id=step + 1, at=1e9 + step, kind="step", text="trained",
            data={
                "step": step, "at": 1e9 + step, "samples": 4, "tokens": 40, "timeline": 0,
                "metrics": {} if step // 1000 % 3 == 2 else {"reward_mean": 7.0 if step == steps // 3 else 0.5},
            },
        )
        for step in range(steps)
    )  # fmt: skip
    event_file.append(event_file.path_of(run), rows)
    return run


def sample(step: int, index: int) -> SampleRecord:
    """Whose answer has more tokens than pieces."""
    return SampleRecord(
        prompt=EVIL, answer=f"{EVIL} end, beyond the pieces", pieces=[EVIL, " end"], logprobs=[-0.1, -3.0],
        trainer_logprobs=[-0.2, -2.0], versions=[(0, 1)], at=1.0, kind="train", step=step, timeline=0, group="e0-p1",
        index=index, ending="finished", finish_reason="stop", prompt_tokens=1, response_tokens=70_000,
        oldest_version=1, newest_version=1, rewards={"right": 1.0}, score=1.0, advantage=0.5,
        error=EVIL if index else None,
    )  # fmt: skip


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def fail(rollout: Rollout, kind: str) -> None:
    rollout.finish(rollout.lease().groups, error=f"{kind}: no", score=None, rewards={})


def test_a_live_run_is_followed_paused_and_resumed(stage: Stage, page: Page) -> None:
    config = make_config(autoscale={"enable": True, "max_replicas": 4})
    served, trainer, rollout = stage.at_work(config, rows=40)
    page.goto(f"{served.url}/#token={'x' * 40}")
    expect(page.locator("#notice")).to_have_text("That is not the token of this job.")
    page.fill("#token", TOKENS["user"])
    page.press("#token", "Enter")
    expect(page.locator("main")).to_contain_text("No step is trained yet")
    train_step(trainer, rollout, 0)
    expect(page.locator("dl")).to_contain_text("1 of")
    expect(page.locator("main")).not_to_contain_text("No step is trained yet")
    page.route("**/v1/events*", lambda route: route.fulfill(status=503), times=1)
    with page.expect_response(lambda answer: "/v1/events" in answer.url and answer.status == 200):
        page.reload()
    page.route("**/v1/overview", lambda route: route.abort(), times=1)
    page.reload()
    expect(page.locator("#notice")).to_contain_text("no answer")
    expect(page.locator("#notice")).to_have_text("")
    expect(page.locator("dl")).to_contain_text("1 of")
    assert TOKENS["user"] not in page.url
    fail(rollout, "KeyError")
    for step in (1, 2):
        train_step(trainer, rollout, step)
    plot = page.locator(".js-plotly-plot .nsewdrag:visible").first
    plot.drag_to(plot, source_position={"x": 60, "y": 40}, target_position={"x": 160, "y": 90}, force=True)
    page.wait_for_function(f"{SHOWN_STEPS} < 1")
    page.get_by_role("link", name="samples that failed").focus()
    fail(rollout, "ValueError")
    train_step(trainer, rollout, 3)
    expect(page.locator("main")).to_contain_text("ValueError")
    expect(page.get_by_role("link", name="samples that failed")).to_be_focused()
    page.wait_for_function("document.querySelector('.js-plotly-plot').data[0].x.at(-1) === 3")
    assert page.evaluate(SHOWN_STEPS) < 1
    page.goto(f"{served.url}/#/samples")
    expect(page.locator("nav [aria-current=page]")).to_have_text("Samples")
    expect(page.locator("#samples")).to_contain_text("No such sample")
    sample_file.Writer(sample_file.folder_of(served.job.run_dir), 10**9).append([sample(4, 0)])
    train_step(trainer, rollout, 4)
    page.get_by_role("link", name="step 4 is there").click()
    expect(page.locator("article")).to_have_count(1)
    page.evaluate(HIDE.format("true"))
    until(lambda: served.controller.events._streams == 0, "a page that is hidden follows nothing")
    page.evaluate(HIDE.format("false"))
    until(lambda: served.controller.events._streams == 1, "a page that is seen again follows the job")
    page.goto(f"{served.url}/#/timeline")
    page.locator("summary").first.click()
    fail(rollout, "TypeError")
    expect(page.locator("details")).to_have_count(3)
    expect(page.locator("details[open]")).to_have_count(1)
    page.goto(f"{served.url}/#/scaling")
    page.fill("#count", "3")
    page.get_by_role("button", name="set").click()
    expect(page.locator("#wanted")).to_have_text("1 of 3 rollout replicas")
    expect(page.locator("tbody tr").first).to_contain_text("1 → 3")
    page.wait_for_function("document.querySelector('.js-plotly-plot').data[1].y.at(-1) === 3")
    assert served.job.scaling.autoscaler.memory.manual == 3
    page.get_by_role("button", name="automatic again").click()
    expect(page.locator("#automatic")).to_be_hidden()
    assert served.job.scaling.autoscaler.memory.manual is None
    page.goto(f"{served.url}/#/")
    page.get_by_role("button", name="pause").click()
    expect(page.locator("#sentence")).to_contain_text("the job is paused")
    assert served.job.facts.paused
    page.reload()
    expect(page.locator("#sentence")).to_contain_text("the job is paused")
    page.get_by_role("button", name="resume").click()
    expect(page.locator("#sentence")).not_to_contain_text("the job is paused")
    for name, seen in (
        ("timeline", "policy-0"),
        ("api", "POST /v1/job/{action}"),
        ("config", "allowed_outdated_steps"),
    ):
        page.goto(f"{served.url}/#/{name}")
        expect(page.locator("main")).to_contain_text(seen)
    page.goto(f"{served.url}/docs")
    page.get_by_label("Find a call").fill("job/{action}")
    expect(page.locator("details")).to_have_count(1)
    page.locator("summary").click()
    expect(page.locator("details")).to_contain_text(f"'{served.url}/v1/job/ACTION'")
    page.get_by_role("button", name="checkpoint").click()
    expect(page.locator("#notice")).to_contain_text("asked for")
    page.keyboard.press("Escape")
    page.route("**/v1/overview", lambda route: route.abort(), times=1)
    page.get_by_role("button", name="drain").click()
    expect(page.locator("#notice")).to_contain_text("no answer")
    page.get_by_role("button", name="drain").click()
    page.get_by_role("button", name="cancel").click()
    assert not any(replica.drain_asked for replica in served.job.registry)
    page.get_by_role("button", name="drain").click()
    page.locator("dialog").get_by_role("button", name="drain").click()
    expect(page.locator("#notice")).to_contain_text("draining")
    assert [replica.name for replica in served.job.registry if replica.drain_asked] == ["rollout-0"]
    page.get_by_role("button", name="stop").click()
    page.get_by_role("button", name="cancel").click()
    assert not served.job.ended
    page.goto(f"{served.url}/#/")
    page.get_by_role("button", name="stop").click()
    page.locator("dialog").get_by_role("button", name="stop").click()
    expect(page.locator("#sentence")).to_contain_text("stopped")
    assert served.job.ended
    page.get_by_role("button", name="log out").click()
    page.reload()
    expect(page.locator("#token")).to_be_visible()


def test_what_a_model_wrote_is_text(tmp_path: Path, page: Page, dashboard) -> None:  # type: ignore[no-untyped-def]
    run = dead(tmp_path / "run", 3)
    records = [sample(2, index) for index in range(2)]
    sample_file.Writer(sample_file.folder_of(run), 10**9).append(records)
    many = [
        records[0].model_copy(update={"kind": "validation", "group": f"v1-p{group}", "index": index})
        for group in range(101)
        for index in range(2)
    ]
    sample_file.Writer(sample_file.folder_of(run), 10**9).append(many)
    lane = {"name": EVIL, "replica_id": "r", "role": "rollout", "state": "live"}
    event = Event(id=9, at=1e9 + 9, kind="replica", text="live", data=lane)  # type: ignore[arg-type]
    event_file.append(event_file.path_of(run), [event])
    (run / "logs").mkdir()
    (run / "logs" / "policy-0.log").write_text(EVIL)
    link = dashboard(run)
    page.goto(link)
    expect(page).to_have_title("run")
    page.goto(link.partition("#")[0] + "#/samples")
    expect(page.locator("article").first).to_contain_text(EVIL)
    for colour, meaning in (
        ("version", "one version"),
        ("mask", "learned from"),
        ("advantage", "better"),
        ("trainer − engine", "minus"),
    ):
        page.select_option("#colour", colour)
        expect(page.locator("#meaning")).to_contain_text(meaning)
    page.keyboard.press("Escape")
    page.locator("article").first.focus()
    page.keyboard.press("j")
    expect(page.locator("article").nth(1)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator("article").nth(1).get_by_role("status")).to_contain_text("trainer − engine -0.1")
    page.locator("article summary").first.click()
    expect(page.locator("article details").first).to_have_text("69998 more tokens: the rest, beyond the pieces")
    page.goto(link.partition("#")[0] + "#/samples/validation")
    expect(page.locator("main")).to_contain_text("The first 200 samples; there are more.")
    expect(page.locator(".groups a").last).to_have_text("v1-p99")
    page.get_by_role("button", name="show more").click()
    expect(page.locator(".groups a").last).to_have_text("v1-p100")
    page.keyboard.press("3")
    expect(page.locator(".yaxislayer-above")).to_contain_text("<script>")
    page.keyboard.press("6")
    expect(page.locator("pre.log")).to_have_text(EVIL)
    assert page.locator("img").count() == 0
    assert page.title() == "run"


def test_a_killed_run_of_many_steps_with_gaps_is_shown_in_few_points(
    tmp_path: Path,
    page: Page,
    dashboard,  # type: ignore[no-untyped-def]
) -> None:
    runs = [dead(tmp_path / name, steps) for name, steps in (("long", STEPS), ("none", 0), ("damaged", 0))]
    event_file.path_of(runs[-1]).unlink()
    event_file.path_of(runs[-1]).mkdir()
    sizes: dict[str, str] = {}
    page.on("response", lambda answer: sizes.update({answer.url: answer.text()} if "/curves" in answer.url else {}))
    page.set_viewport_size({"width": 375, "height": 700})
    link = dashboard(*runs)
    page.goto(link)
    expect(page.locator(".js-plotly-plot").first).to_be_visible()
    expect(page.locator("main")).to_contain_text("no summary was written")
    expect(page.locator("main")).to_contain_text("events.jsonl cannot be read")
    expect(page.locator("main")).to_contain_text("Not known of a killed run: how many groups")
    answers = [json.loads(text) for text in sizes.values()]
    assert sorted(answer["total"] for answer in answers) == [0, STEPS]
    assert max(map(len, sizes.values())) < 100_000
    curve = next(answer["curves"]["reward_mean"] for answer in answers if answer["total"])
    assert max(value or 0 for value in curve["values"]) == 7.0
    assert None in curve["values"]
    for name in ("", "samples", "timeline", "scaling", "config", "logs", "api"):
        page.goto(link.partition("#")[0] + f"#/{name}")
        expect(page.locator("main").locator("section, p").first).to_be_visible()
        until(lambda: fits(page), "nothing is wider than the screen")
