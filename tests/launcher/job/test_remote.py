"""Where a controller is reached, and what is said when it is not."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from controller.client import Untrusted
from controller.client import calls as api
from launcher.commands import plot
from launcher.errors import LaunchError
from launcher.job.remote import HOW_TO_GET_IN, RemoteJob, find
from launcher.nodes import join
from launcher.plan.addresses import controller_url, reachable_elsewhere, url_of
from launcher.plan.rundir import RunDir, RunTokens
from launcher.restarts import Role
from tests.launcher.samples import config
from tests.support.controller import TOKENS
from tests.support.proof import http, impostor, proof_of


@pytest.mark.parametrize(
    ("host", "here", "elsewhere"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1", socket.gethostname()),
        ("::", "[::1]", socket.gethostname()),
        ("head-node", "head-node", "head-node"),
    ],
)
def test_other_machines_are_told_an_address_that_they_reach(host: str, here: str, elsewhere: str):
    settings = config(controller={"host": host})
    assert controller_url(settings, 7) == f"http://{here}:7"
    assert url_of(settings, reachable_elsewhere(settings), 7) == f"http://{elsewhere}:7"


def test_a_certificate_that_is_not_trusted_is_no_wrong_address():
    error = RemoteJob(None, "https://h:1", "t")._refused("https://h:1", Untrusted("export COSMOS_TLS_CA"))
    assert error.render() == "export COSMOS_TLS_CA"


def test_a_stale_run_directory_gives_no_token_away(tmp_path: Path) -> None:
    """Another program has the port of its controller by now; `status`, `stop`, `join` and the like read its files."""
    run, tokens = RunDir(tmp_path / "run"), RunTokens.fresh()
    run.make()
    run.write_tokens(tokens, trainers=True)
    run.write_config(config())
    with impostor(lambda *_: http(b"{}")) as there:
        run.controller_json.write_text(json.dumps({"url": there.url, "pid": 1, "job_id": "j"}))
        os.utime(run.controller_json, (0.0, 0.0))
        target = RemoteJob(run, token=tokens.user)
        with pytest.raises(LaunchError, match="is not running"):
            target.ask(api.job())
        run.lock()
        try:
            with pytest.raises(LaunchError, match="its controller is not there yet"):
                target.ask(api.job())
            assert there.connections == 0, "the address is of an earlier start"
            run.controller_json.touch()
            with pytest.raises(LaunchError, match=f"what listens at {there.url} does not prove"):
                target.ask(api.operate("stop"))
            with pytest.raises(LaunchError, match="does not prove"):  # a browser would hand the token over
                plot.dashboard([run.path], port=0, as_json=False)
            for role in (Role.ROLLOUT, Role.POLICY):
                found = join._Controller.of(run, role)
                assert found is not None
                assert "does not prove" in join._look(run, found)[1]
        finally:
            run.unlock()
        assert there.connections >= 3
        assert not [token for token in vars_of(tokens) if token.encode() in there.received]
        assert b"uthorization" not in there.received


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_another_users_run_directory_gets_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names an address, and an authority that vouches for it; or it leads to tokens of this user."""
    mine, theirs = RunDir(tmp_path / "mine"), RunDir(tmp_path / "theirs")
    for run in (mine, theirs):
        run.make()
        run.write_config(config())
        run.controller_json.write_text(json.dumps({"url": "https://127.0.0.1:1"}))
        run.lock()
    try:
        mine.write_tokens(RunTokens.fresh())
        monkeypatch.setattr(os, "geteuid", lambda: 1)
        for owner in (1, 2):
            os.chown(theirs.config_json, owner, owner)
            token = find([str(theirs.path)], [], {"COSMOS_TOKEN": "of another job"}).token
            assert token == ("of another job" if owner == 1 else "")
        (theirs.path / ".tokens" / "user").symlink_to(mine.path / ".tokens" / "user")
        assert theirs.read_token() is None, "it is not of who started that run"
        assert mine.read_token()
        target = RemoteJob(theirs, token="t")
        assert target.address() == "", "nor is this"
        os.chown(theirs.controller_json, 2, 2)
        theirs.controller_json.touch()
        with pytest.raises(LaunchError, match="none can be read") as caught:
            RemoteJob(theirs).ask(api.job())
        assert caught.value.hint.endswith("and ask its controller: https://127.0.0.1:1")
    finally:
        for run in (mine, theirs):
            run.unlock()


def test_a_token_that_the_controller_does_not_have_is_not_sent() -> None:
    """The user hears that the token or the address may be an old one."""
    answers = [TOKENS["policy"]]
    with impostor(lambda head, address: http(proof_of(head.split()[1], answers, address))) as there:
        with pytest.raises(LaunchError, match="or the address is") as caught:
            RemoteJob(None, there.url, "the-token-of-an-earlier-start").ask(api.job())
        assert caught.value.hint == HOW_TO_GET_IN
        assert b"earlier-start" not in there.received


def vars_of(tokens: RunTokens) -> list[str]:
    return [tokens.user, tokens.rollout, tokens.policy]
