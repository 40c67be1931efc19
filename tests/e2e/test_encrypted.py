"""One job over https and rediss with a password, uploaded to S3, in which 15 % of the rewards fail, and a replica,
the trainer and the launcher are killed: no secret is anywhere it could be read, and what people see is true.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from controller.client import Client, Untrusted
from controller.client import calls as api
from tests.chaos.traces import is_keeper, role_of
from tests.e2e.held import go_on
from tests.e2e.program import COMMAND, Program, check_ledger
from tests.e2e.screens import STEPS, alive, curves, dead, flaky_job, operate, paused_at
from tests.security.modes import umask, wrong_modes
from tests.support.certificates import make_certificates
from tests.support.objects import running_objects
from tests.support.secrets_table import secrets_table
from tests.support.tls_proxy import tls_proxy
from tests.support.uploaded import check_uploaded
from tests.support.valkey import running_valkey
from tests.support.waiting import PATIENCE, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BUCKET = "cosmos-encrypted"
IN_ADDRESSES = {
    "COSMOS_CUSTOM__HOOK": "https://bot:{}@hooks.example.org/x?token=planted-query-token&n=1",
    "https_proxy": "http://me:{}@proxy.example.org:3128",
    "DATABASE_URL": "postgres://me:{}@database.example.org/prompts",
}
MADE = ("COSMOS_TOKEN_USER", "COSMOS_TOKEN_ROLLOUT", "COSMOS_TOKEN_POLICY", "COSMOS_REPLICA_SECRET")
"""What the launcher makes."""
PLANTED = {name: f"planted-{name}".lower() for name in secrets_table() if name not in MADE}
UNUSED = ("TEACHER_API_KEY",)
"""What the configuration of this job does not name."""

EXTRA = """
tls_cert = "{cert}"
tls_key = "{key}"
tls_ca = "{ca}"

[redis]
url = "rediss://default@127.0.0.1:{port}/0"
tls_ca = "{ca}"
tls_cert = "{client_cert}"
tls_key = "{client_key}"

[train.ckpt]
enable_checkpoint = true
save_freq = 4
upload_s3 = "all"
s3_bucket = "{bucket}"

[logging]
logger = ["console", "tensorboard", "wandb"]
sample_groups = 4

[launcher]
"""
REWARD = '\n[reward]\non_error = "mask"\nenvironment = ["JUDGE_API_KEY"]\n'


@dataclass
class Environments:
    """What is in the environment of the job's processes, by what they are; children count as what started them."""

    program: Program
    found: dict[str, set[bytes]] = field(default_factory=dict)

    def look(self) -> dict[str, set[bytes]]:
        for process in self.program.processes():
            try:
                data, role, above = Path(f"/proc/{process.pid}/environ").read_bytes(), None, process
                while role is None:
                    argv = tuple(above.cmdline())
                    role = "keeper" if is_keeper(argv) else role_of(argv) or None
                    above = above.parent()
            except (psutil.Error, OSError, AttributeError, IndexError):
                continue  # it has ended, or is the launcher before it has become another program
            self.found.setdefault(str(role), set()).add(data)
        return self.found

    def made(self) -> dict[str, str]:
        """What the launcher has made, by its variable."""
        data = b"\0".join(self.found["controller"] | self.found["rollout"]).split(b"\0")
        values = dict(os.fsdecode(entry).split("=", 1) for entry in data if b"=" in entry)
        return {name: values[name] for name in MADE}

    def holders(self, secret: str) -> set[str]:
        return {role for role, held in self.found.items() if any(secret.encode() in data for data in held)}


def where_read(program: Program, secrets: set[str]) -> list[str]:
    """Files of the run that hold a secret, but for those that are there to hold one, and command lines that do."""
    found = []
    keep = program.run_dir / ".tokens"
    for path in [*program.run_dir.rglob("*"), program.config.parent / "launcher.log"]:
        if path.is_file() and keep not in path.parents:
            data = path.read_bytes()
            found += [f"{path}: {secret[:12]}…" for secret in secrets if secret.encode() in data]
    for process in program.processes():
        try:
            line = "\0".join(process.cmdline())
        except psutil.Error:
            continue
        found += [f"command line of {process.pid}" for secret in secrets if secret in line]
    return found


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_job_that_is_disturbed_shows_what_is_true_and_gives_no_secret_away(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COSMOS_TLS_CA", raising=False)
    made = make_certificates(tmp_path / "tls")
    with (
        running_valkey(password=PLANTED["COSMOS_REDIS_PASSWORD"]) as server,
        tls_proxy(server.url, made.server_context(ask_client=True)) as port,
        running_objects(BUCKET) as store,
    ):
        for name, value in (store.environment | PLANTED).items():
            monkeypatch.setenv(name, IN_ADDRESSES.get(name, "{}").format(value))
        monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
        monkeypatch.setenv("WANDB_MODE", "offline")
        config = flaky_job(tmp_path, model)
        files = {name: getattr(made, name) for name in ("ca", "cert", "key", "client_cert", "client_key")}
        extra = EXTRA.format(port=port, bucket=BUCKET, **files)
        text = config.read_text().replace("\n[launcher]\n", extra)
        config.write_text(text.replace("\n[reward]\n", REWARD))
        with umask(0o027):
            with Program(config) as program:
                environments = Environments(program)
                until(lambda: "data" in environments.look(), "the preparation of the data")
                monkeypatch.setenv("COSMOS_TLS_CA", str(made.ca))  # for the test's own clients
                program.until("a pause", lambda client: paused_at(client, 1))
                until(lambda: "trackers" in environments.look(), "the process that feeds trackers")
                values = PLANTED | environments.made()
                for name, held in secrets_table().items():
                    assert environments.holders(values[name]) == (set() if name in UNUSED else held), name
                assert {"keeper", "reward"} <= set(environments.found)
                secrets = {*values.values(), "planted-query-token"}
                _look_as_users_do(program, secrets)
                _check_successor(program)
                operate(program, "resume")
                program.until_step(6)
                program.kill("policy_worker")
                program.until("a pause after the rewind", lambda client: paused_at(client, 6, timeline=1))
                status = alive(program)
                assert where_read(program, secrets) == []
                operate(program, "resume")
                os.kill(program.process.pid, signal.SIGKILL)
                program.process.wait()
                program.wait_no_orphans()
            dead(program)
            go_on(config)
            with Program(config, ("--resume",)) as program:
                summary = program.finish()
        check_ledger(summary, 2, trained=4 * STEPS)
        assert summary["starts"] == 2
        assert summary["total_elapsed_s"] > summary["elapsed_s"]
        assert summary["restarts"]["policy-0"] >= 1
        assert sum(summary["status"]["rewards"]["failed"].values()) > status.rewards.timeouts
        curves(program.run_dir, summary)
        assert where_read(program, secrets) == []
        assert all(secret not in program.output() for secret in secrets)
        checkpoints = sorted((program.run_dir / "checkpoints").glob("step-*"))
        steps = {int(path.name.removeprefix("step-")) for path in checkpoints}
        assert steps >= {4, 8, 12, 14}, "and one that the trainer wrote as it left, if it had the time"
        for path in (*checkpoints, program.run_dir / "final"):
            check_uploaded(store, BUCKET, f"outputs/run/{path.name}", path)
        assert wrong_modes(program.run_dir) == {}
        with server.client() as redis:
            stored = b"".join(redis.dump(key) or b"" for key in redis.keys("*"))
        assert all(secret.encode() not in stored for secret in secrets)


def _check_successor(program: Program) -> None:
    """Who is started for a killed rollout replica has its secret, and so its place at once; no reward process has."""

    def own(pid: int) -> str:
        return psutil.Process(pid).environ()["COSMOS_REPLICA_SECRET"]

    pid = program.pid_of("rollout_worker")
    secret, children = own(pid), psutil.Process(pid).children(recursive=True)
    assert children, "processes of rewards"
    assert all(secret not in child.environ().values() for child in children)
    program.kill("rollout_worker")

    def second(client: Client) -> bool:
        return any(info.replica_id == "rollout-0.2" for info in client.send(api.replicas()))

    assert program.until("the successor", second)
    assert own(program.pid_of("rollout_worker")) == secret
    assert "waiting for the name" not in (program.run_dir / "logs" / "rollout-0.log").read_text()


def _look_as_users_do(program: Program, secrets: set[str]) -> None:
    url = json.loads((program.run_dir / "controller.json").read_text())["url"]
    assert url.startswith("https://127.0.0.1:")
    token = (program.run_dir / ".tokens" / "user").read_text()
    shown = [
        command("status", str(program.run_dir), COSMOS_TLS_CA=""),
        command("status", url, COSMOS_TOKEN=token),
        command("show", "--config", str(program.config)),
        command("validate", str(program.config)),
    ]
    assert [done.returncode for done in shown[:2]] == [0, 0], (shown[0].stderr, shown[1].stderr)
    texts = [done.stdout + done.stderr for done in shown]
    ca = os.environ["COSMOS_TLS_CA"]
    with Client(url, token, tls_ca=ca) as client:
        assert client.send(api.job()).step >= 1
        for path in ("/v1/config", "/metrics", "/v1/job", "/v1/replicas", "/v1/steps", "/v1/openapi.json"):
            answer = client._http.get(url + path)
            assert answer.status_code == 200
            texts.append(answer.text)
        texts.append(client._http.get(url + "/v1/job", headers={"authorization": "Bearer wrong"}).text)
    for text in texts:
        assert all(secret not in text for secret in secrets), text
    with Client(url, token, tls_ca="") as client, pytest.raises(Untrusted):
        client.send(api.job())
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https://", "http://") + "/healthz", trust_env=False)
