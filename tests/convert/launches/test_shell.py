"""Shell scripts as people start jobs by them: what they start, what they depend on, and that nothing of them runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from convert import convert
from convert.engine.model import Conversion
from convert.launches import shell
from convert.launches.reading import ConversionRequest
from convert.launches.shell_text import unquoted
from schema.sandbox.bubblewrap import why_not
from tests.convert.files import values_of
from tests.schema.config_samples import refused

MAIN = "python3 -m verl.trainer.main_ppo"
pytestmark = pytest.mark.skipif("does not work here" in why_not(), reason=why_not())
SCRIPT = f"""#!/usr/bin/env bash
set -xeuo pipefail
export GROUP=4
MODEL=${{MODEL:-org/model}}
HERE=$(dirname "$0")
source "$HERE/common.sh"
mkdir -p "$HOME/logs"
rm -rf /everything
ARGS=(
    data.train_files="['$DATA/a.parquet', '$DATA/b.parquet']"
    "trainer.experiment_name='a quoted name'"
)
start() {{
    local lr=$1; shift
    ray job submit -- {MAIN} \\
        actor_rollout_ref.actor.optim.lr=$lr actor_rollout_ref.rollout.n=$GROUP "${{ARGS[@]}}" "$@"
}}
for lr in 1e-6 2e-6; do
    start $lr actor_rollout_ref.model.path=$MODEL 2>&1 | tee "$HOME/logs/$lr.log"
done
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "common.sh").write_text("DATA=/data\n")
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    return path


def converted(path: Path, text: str = "", number: int | None = None, **answers: str) -> Conversion:
    if text:
        path.write_text(text)
    return convert(path, request=ConversionRequest(number=number, answers=answers, home="/home/me"))


def test_a_job_is_what_bash_makes_of_the_script(script: Path) -> None:
    result = converted(script, number=2, MODEL="org/other")
    keys = ("train.optm_lr", "rollout.n_generation", "policy.model_name_or_path", "logging.experiment_name")
    assert list(values_of(result, keys).values()) == [2e-6, 4, "org/other", "a quoted name"]
    assert result.config["train"]["train_policy"]["dataset"]["files"] == ["/data/a.parquet", "/data/b.parquet"]
    assert f"{script} starts verl.trainer.main_ppo in line 15" in result.warnings
    (problem,) = refused(converted, script)
    assert problem.message.startswith("starts 2 jobs: 1: line 15, verl.trainer.main_ppo actor_rollout_ref.act")
    (problem,) = refused(converted, script, number=3)
    assert "--launch 3: the script starts 2 jobs" in problem.message


DEPENDS: list[tuple[str, dict[str, str]]] = [
    (f"N=$(nvidia-smi -L | wc -l)\n{MAIN} trainer.nnodes=$N", {"N": "the output of `wc -l`"}),
    (f"{MAIN} trainer.nnodes=$(nproc --all)", {"nproc --all": "the output of `nproc --all`"}),
    (f"{MAIN} trainer.nnodes=$1", {"1": "argument 1 of the script"}),
    (f"{MAIN} trainer.nnodes=$NODES", {"NODES": "a variable that is not set"}),
    (f'if [ "$KIND" = big ]; then {MAIN} trainer.nnodes=2; else {MAIN}; fi', {"KIND": "a variable that is not set"}),
    (f"case $1 in a) {MAIN} trainer.nnodes=2;; *) {MAIN};; esac", {"1": "argument 1 of the script"}),
    (f"N=$(nproc)\n{MAIN} trainer.nnodes=$((N * 2))", {"N": "the output of `nproc`"}),
]


@pytest.mark.parametrize(("text", "asked"), DEPENDS, ids=[next(iter(asked)) for _, asked in DEPENDS])
def test_what_a_job_depends_on_is_asked_for_by_name(script: Path, text: str, asked: Mapping[str, str]) -> None:
    text = f"#!/bin/bash\n{text}\n"
    problems = refused(converted, script, text)
    assert [problem.message for problem in problems] == [f"the job depends on {what}" for what in asked.values()]
    (name,) = asked
    assert f"{name}=VALUE" in problems[0].hint
    answers = {name: "big" if name == "KIND" else "a" if "case" in text else "2"}
    nodes = convert(script, request=ConversionRequest(answers=answers)).config.get("placement", {}).get("nodes", 1)
    assert nodes == (4 if "* 2" in text else 2)


@pytest.mark.parametrize(
    "text",
    [
        f'[ -z "$WANDB_KEY" ] && echo no key\n{MAIN}',
        f"export PYTHONPATH=$PYTHONPATH:.\n{MAIN}",
        f"if nvidia-smi; then echo gpu; fi\n{MAIN}",
        f'exec > "$HOME/logs/x.log"\ncd /no/such/place\n{MAIN}',
        f"source ~/venv/bin/activate\n. /etc/profile\n{MAIN}",
        f"set +x +u\nPS4=ours\n{MAIN}",
        f"/opt/python/bin/python3 -m verl.trainer.main_ppo &\nwait\nX=$(cat <<EOF\n{MAIN}\nEOF\n)",
        f'bash -c "{MAIN}"',
        f"exec {MAIN}",
        f"trap 'echo end' EXIT\n{MAIN} $@",
    ],
)
def test_what_changes_no_job_is_not_asked_for(script: Path, text: str) -> None:
    assert converted(script, f"#!/bin/bash\nset -e\n{text}\n").system == "verl"


HOSTILE: list[tuple[str, str]] = [
    (
        "rm -rf {victim}\n/bin/rm -rf {victim}\n> {victim}/file\necho x > {victim}/new\nmv {victim} /tmp",
        "starts no job",
    ),
    ("exec /bin/rm -rf {victim}", "starts no job"),
    ("while true; do :; done", "prints more than 2 MiB"),
    ("kill -STOP $$", "does not end within 10 s"),
    ("f() {{ f | f & }}; f; sleep 9; wait", "starts"),
    ("for i in {{1..300}}; do (while :; do :; done) & done; wait", "a shell script that"),
    ("while :; do echo $RANDOM; done", "prints more than 2 MiB"),
    ("eval \"$(echo 'rm -rf {victim}')\"; coproc rm -rf {victim}; enable -f /lib/x y", "starts no job"),
    ("if then fi", "starts no job"),
]


@pytest.mark.parametrize(("text", "message"), HOSTILE, ids=[text[:12] for text, _ in HOSTILE])
def test_nothing_of_a_script_runs_and_it_ends(script: Path, tmp_path: Path, text: str, message: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("kept")
    (problem,) = refused(converted, script, "#!/bin/bash\n" + text.format(victim=victim))
    assert message in problem.message
    assert problem.hint
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert (victim / "file").read_text() == "kept"


def test_without_bubblewrap_the_text_is_read(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "why_not", lambda: "bwrap (bubblewrap) is not installed")
    text = (
        "export N=2\nDATA=/data\nARGS=(\n  data.train_files=$DATA/a.parquet\n  'trainer.experiment_name=b c'\n)\n"
        f"nohup {MAIN} \\\n  trainer.nnodes=${{N}} \\\n  actor_rollout_ref.rollout.n=${{GROUP:-8}} "
        '"${ARGS[@]}" $@ > log 2>&1 &\n'
    )
    result = converted(script, f"#!/bin/bash\n{text}")
    keys = ("placement.nodes", "rollout.n_generation", "logging.experiment_name")
    assert list(values_of(result, keys).values()) == [2, 8, "b c"]
    assert result.config["train"]["train_policy"]["dataset"]["files"] == ["/data/a.parquet"]
    assert "was read without running it" in result.warnings[0]
    problems = refused(converted, script, f"#!/bin/bash\n{MAIN} trainer.nnodes=$(nproc) trainer.x=$MODE\n")
    assert [problem.message for problem in problems] == [
        "the job depends on the output of `nproc`",
        "the job depends on a variable that is not known",
    ]


def test_processes_of_torchrun_are_those_of_a_supervised_job(script: Path) -> None:
    line = "torchrun --standalone --nnodes=1 --nproc_per_node 4 -m verl.trainer.sft_trainer model.path=o/m"
    assert converted(script, f"#!/bin/bash\n{line}\n").config["placement"]["gpus_per_node"] == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'b c' d", ["a", "b c", "d"]),
        (r"'it'\''s' x\ y", ["it's", "x y"]),
        (r"$'a\nb\x41\'c' ''", ["a\nbA'c", ""]),
        ("x=$'\\001nproc\\002'", ["x=\x01nproc\x02"]),
    ],
)
def test_words_of_a_trace(text: str, words: list[str]) -> None:
    assert unquoted(text) == words
