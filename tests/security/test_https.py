"""The API over TLS: both ends verified by what the configuration names, mistakes found before anything starts."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from controller.client import AsyncClient, Client, ControllerLost, Untrusted
from controller.client import calls as api
from controller.server import StartError, serve
from launcher.plan.addresses import controller_url
from launcher.plan.credentials import environment
from launcher.plan.machine import Machine
from launcher.plan.rundir import RunTokens
from launcher.plan.tls import check_encryption, unencrypted_addresses
from launcher.pods.api_server import ApiServer, ClusterError
from launcher.preflight.checks import check_machine
from launcher.restarts import Role
from schema.config import Config, check_warnings
from schema.config.rules import check_rules
from schema.util.tls import client_context, faults, server_context
from tests.security.conftest import read_settings
from tests.support.certificates import Certificates, make_certificates
from tests.support.controller import TOKENS, ControllerProcess, make_config, make_run_dir, running_controller
from tests.support.proof import http as answer
from tests.support.proof import impostor
from tests.support.tls_proxy import tls_proxy
from tests.support.valkey import running_valkey
from tests.support.waiting import PATIENCE


def encrypted(certificates: Certificates, **more: Any) -> Config:
    files = {"tls_cert": certificates.cert, "tls_key": certificates.key, "tls_ca": certificates.ca}
    return make_config(controller={**{name: str(file) for name, file in files.items()}, **more})


@pytest.fixture(scope="module")
def https_controller(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Any:
    run_dir = make_run_dir(tmp_path_factory.mktemp("https") / "run", encrypted(certificates))
    with running_valkey() as valkey, running_controller(run_dir, valkey.url) as process:
        yield process


def url_of(process: ControllerProcess) -> str:
    return str(process.address()["url"])


# ---- serving --------------------------------------------------------------------------------------------------


def test_both_clients_verify_and_are_answered(
    https_controller: ControllerProcess, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(https_controller)
    assert url.startswith("https://127.0.0.1:")
    with Client(url, TOKENS["user"], tls_ca=str(certificates.ca)) as client:
        assert client.send(api.job()).job_id == https_controller.address()["job_id"]
    monkeypatch.setenv("COSMOS_TLS_CA", str(certificates.ca))

    async def ask() -> str:
        async with AsyncClient(url, TOKENS["user"]) as client:
            return (await client.send(api.job())).job_id

    assert asyncio.run(ask()) == https_controller.address()["job_id"]


def test_who_is_not_trusted_gets_no_token_and_no_second_attempt(
    https_controller: ControllerProcess, other_authority: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(https_controller)
    monkeypatch.delenv("COSMOS_TLS_CA", raising=False)
    for ca in (str(other_authority.ca), None):
        with (
            Client(url, TOKENS["user"], patience=600.0, tls_ca=ca) as client,
            pytest.raises(Untrusted, match="COSMOS_TLS_CA"),
        ):
            client.send(api.job())
    with pytest.raises(Untrusted, match="cannot be read"):
        Client(url, TOKENS["user"], tls_ca="/no/such/file.pem")


def test_plain_http_is_not_answered(https_controller: ControllerProcess) -> None:
    url = url_of(https_controller).replace("https://", "http://")
    with Client(url, TOKENS["user"]) as client, pytest.raises(ControllerLost):
        client.send(api.job())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_newer_protocols_are_spoken(
    https_controller: ControllerProcess, certificates: Certificates, version: ssl.TLSVersion
) -> None:
    context = client_context(str(certificates.ca))
    context.minimum_version = context.maximum_version = version
    with _connected(https_controller, context) as connection:
        assert connection.version() == {"TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}[version.name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_older_protocols_are_refused(https_controller: ControllerProcess, certificates: Certificates) -> None:
    context = client_context(str(certificates.ca))
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        _connected(https_controller, context)
    server = server_context(str(certificates.cert), str(certificates.key))
    assert server.minimum_version is ssl.TLSVersion.TLSv1_2
    assert client_context("").minimum_version is ssl.TLSVersion.TLSv1_2


def _connected(process: ControllerProcess, context: ssl.SSLContext) -> ssl.SSLSocket:
    port = int(url_of(process).rpartition(":")[2])
    plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    try:
        return context.wrap_socket(plain, server_hostname="127.0.0.1")
    except BaseException:
        plain.close()
        raise


def test_answers_do_not_say_what_serves_them(https_controller: ControllerProcess, certificates: Certificates) -> None:
    with Client(url_of(https_controller), TOKENS["user"], tls_ca=str(certificates.ca)) as client:
        for path in ("/healthz", "/v1/job", "/no/such/path"):
            headers = client._http.get(path).headers
            assert "server" not in headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"


def test_a_controller_does_not_start_with_the_wrong_key(
    tmp_path: Path, certificates: Certificates, other_authority: Certificates
) -> None:
    config = encrypted(certificates, tls_key=str(other_authority.key))
    settings = read_settings(make_run_dir(tmp_path / "run", config))
    with pytest.raises(StartError, match="is not the private key of"):
        asyncio.run(serve(settings))


# ---- before the start -----------------------------------------------------------------------------------------

Change = Callable[[Certificates, Path], dict[str, str]]


def _spoiled(name: str, text: str) -> Change:
    def change(certificates: Certificates, folder: Path) -> dict[str, str]:
        (folder / "spoiled").write_text(text)
        return {name: str(folder / "spoiled")}

    return change


def _issued(**how: Any) -> Change:
    def change(_: Certificates, folder: Path) -> dict[str, str]:
        made = make_certificates(folder / "made", **how)
        return {"tls_cert": str(made.cert), "tls_key": str(made.key), "tls_ca": str(made.ca)}

    return change


def _with_passphrase(certificates: Certificates, folder: Path) -> dict[str, str]:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(certificates.key.read_bytes(), None)
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (folder / "key").write_bytes(text)
    return {"tls_key": str(folder / "key")}


FAULTS: dict[str, tuple[Change, str]] = {
    "no certificate": (lambda c, f: {"tls_cert": str(f / "none")}, "none cannot be read: No such file"),
    "no key": (lambda c, f: {"tls_key": str(f / "none")}, "none cannot be read: No such file"),
    "no authority": (lambda c, f: {"tls_ca": str(f / "none")}, "none cannot be read: No such file"),
    "a directory": (lambda c, f: {"tls_cert": str(f)}, "Is a directory"),
    "a name no file can have": (lambda c, f: {"tls_key": "a\0b"}, "null byte"),
    "no PEM": (_spoiled("tls_cert", "hello"), "are no certificate and private key in PEM"),
    "no authority in PEM": (_spoiled("tls_ca", "hello"), "holds no certificate in PEM"),
    "the key of another": (lambda c, f: {"tls_key": str(c.client_key)}, "is not the private key of"),
    "a passphrase": (_with_passphrase, "is encrypted"),
    "expired": (_issued(expires=datetime.now(UTC) - timedelta(days=1)), "certificate has expired"),
    "for another host": (_issued(hosts=("controller.example.org",)), "certificate is not valid for '127.0.0.1'"),
    "the authority of another": (
        lambda c, f: {"tls_ca": str(make_certificates(f / "other").ca)},
        "unable to get local issuer certificate|self-signed certificate|signature failure",
    ),
    "an authority nobody knows": (lambda c, f: {"tls_ca": ""}, "no tls_ca is named"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_with_the_files_is_named(certificates: Certificates, tmp_path: Path, name: str) -> None:
    change, says = FAULTS[name]
    config = encrypted(certificates, **change(certificates, tmp_path))
    (problem,), _ = check_encryption(config)
    assert problem.key == "controller.tls_cert"
    assert re.search(says, problem.message), problem.message
    assert "docs/security.md" in problem.hint


def test_sound_files_have_no_findings(certificates: Certificates) -> None:
    assert check_encryption(encrypted(certificates)) == ([], [])
    assert check_encryption(encrypted(certificates, host="0.0.0.0")) == ([], []), "reached by 127.0.0.1"
    assert check_encryption(make_config()) == ([], [])
    files = (str(certificates.cert), str(certificates.key), str(certificates.ca))
    assert faults(*files, "localhost") == []


def test_faults_end_the_preflight(certificates: Certificates, tmp_path: Path) -> None:
    config = encrypted(certificates, tls_key=str(certificates.client_key))
    data = config.to_dict()
    data["train"]["output_dir"] = str(tmp_path)
    found = check_machine(Config.model_validate(data), Machine(cores=2))
    assert "controller.tls_cert" in [problem.key for problem in found.problems]


def test_a_key_that_everybody_can_read_is_a_warning(certificates: Certificates, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(certificates.key.read_bytes())
    key.chmod(0o644)
    problems, (warning,) = check_encryption(encrypted(certificates, tls_key=str(key)))
    assert problems == []
    assert (warning.key, warning.hint) == ("controller.tls_key", f"chmod 600 {key}")
    key.chmod(stat.S_IRUSR)
    assert check_encryption(encrypted(certificates, tls_key=str(key))) == ([], [])


# ---- rules ----------------------------------------------------------------------------------------------------


def problem_keys(**sections: Any) -> list[str]:
    return [problem.key for problem in check_rules(make_config(**sections)) if "tls" in problem.key]


def test_files_that_belong_together_are_named_together() -> None:
    assert problem_keys(controller={"tls_cert": "a"}) == ["controller.tls_cert"]
    assert problem_keys(controller={"tls_key": "a"}) == ["controller.tls_key"]
    assert problem_keys(controller={"tls_ca": "a"}) == ["controller.tls_ca"]
    assert problem_keys(controller={"tls_cert": "a", "tls_key": "b"}) == []
    address = {"url": "rediss://h:1"}
    assert problem_keys(redis={"tls_ca": "a"}) == ["redis.tls_ca"]
    assert problem_keys(redis={"url": "redis://h:1", "tls_ca": "a"}) == ["redis.tls_ca"]
    assert problem_keys(redis={**address, "tls_key": "a"}) == ["redis.tls_key"]
    assert problem_keys(redis={**address, "tls_ca": "a", "tls_cert": "b", "tls_key": "c"}) == []


@pytest.mark.parametrize(
    ("host", "warned"),
    [("127.0.0.1", False), ("127.1.2.3", False), ("::1", False), ("localhost", False), ("0.0.0.0", True),
     ("10.0.0.7", True), ("node-1.example.org", True)],
)  # fmt: skip
def test_listening_for_others_without_tls_is_a_warning(host: str, warned: bool) -> None:
    def keys(**more: str) -> list[str]:
        return [warning.key for warning in check_warnings(make_config(controller={"host": host, **more}))]

    assert ("controller.host" in keys()) is warned
    assert "controller.host" not in keys(tls_cert="a", tls_key="b")


def test_a_cluster_of_another_authority_gets_no_token(
    certificates: Certificates, other_authority: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("token-of-the-service-account")
    (tmp_path / "ca.crt").write_bytes(certificates.ca.read_bytes())

    async def call(port: int) -> None:
        server = ApiServer(f"https://127.0.0.1:{port}", tmp_path)
        async with server.client() as http:
            await server.call(http, "/api")

    with impostor(lambda *_: answer(b"{}")) as there:
        target = there.url.replace("http", "tcp")
        with (
            tls_proxy(target, other_authority.server_context()) as port,
            pytest.raises(ClusterError, match="certificate"),
        ):
            asyncio.run(call(port))
        assert there.received == b""
        with tls_proxy(target, certificates.server_context()) as port:
            asyncio.run(call(port))
        assert b"token-of-the-service-account" in there.received


def test_addresses_of_the_environment_without_tls_are_warnings(tmp_path: Path) -> None:
    """Only addresses that the job uses count, and only if they lie on another machine or behind a proxy."""
    nowhere = {"AWS_CONFIG_FILE": str(tmp_path / "none")}
    there = {"AWS_ENDPOINT_URL": "http://store:9000", "HF_ENDPOINT": "http://10.0.0.7", "WANDB_BASE_URL": "http://w"}

    def named(environ: dict[str, str], **sections: Any) -> list[str]:
        found = unencrypted_addresses(make_config(**sections), nowhere | environ)
        return [problem.message.partition(" ")[0] for problem in found]

    def said(environ: dict[str, str], **sections: Any) -> str:
        found = unencrypted_addresses(make_config(**sections), nowhere | environ)
        return "".join(problem.message for problem in found)

    assert named(there) == ["HF_ENDPOINT"]
    bucket = {"weight_sync": {"store": "s3://bucket/weights"}}
    assert named(there, logging={"logger": ["wandb"]}, **bucket) == sorted(there)
    assert named({**there, "AWS_ENDPOINT_URL_S3": "https://store"}, **bucket) == ["HF_ENDPOINT"]
    assert named(dict.fromkeys(there, "http://127.0.0.1:9000"), **bucket) == []
    assert named(dict.fromkeys(there, "https://h"), **bucket) == []
    here, proxy = {"HF_ENDPOINT": "http://127.0.0.1:9000"}, {"all_proxy": "http://proxy:3128"}
    assert named({**here, **proxy}) == []
    assert "the proxy proxy:3128 of all_proxy" in said({"HF_ENDPOINT": "http://hub.example.com", **proxy})
    assert "the proxy" not in said({"HF_ENDPOINT": "http://hub.example.com", **proxy, "no_proxy": "example.com"})
    assert named({"HF_ENDPOINT": "https://h", **proxy}) == []
    bare = {"AWS_ENDPOINT_URL": "http://store.example.com", **proxy}
    assert "the proxy" not in said(bare, **bucket), "boto3 does not read it"
    (tmp_path / "config").write_text("[default]\nregion = x\n[profile far]\nendpoint_url = http://store:9000\n")
    profiles = {"AWS_CONFIG_FILE": str(tmp_path / "config")}
    assert named(profiles, **bucket) == []
    assert named({**profiles, "AWS_PROFILE": "far"}, **bucket) == ["endpoint_url"]
    assert named({**profiles, "AWS_PROFILE": "far", "AWS_ENDPOINT_URL": "https://h"}, **bucket) == []


def test_an_unverified_redis_is_a_warning_and_a_broken_address_a_problem() -> None:
    def warned(url: str) -> bool:
        return "redis.url" in [warning.key for warning in check_warnings(make_config(redis={"url": url}))]

    assert warned("redis://10.0.0.7:6379/0")
    assert not warned("redis://[::1]:6379/0")
    assert not warned("redis://localhost")
    assert warned("rediss://h:1?ssl_cert_reqs=none")
    assert warned("rediss://h:1?ssl_check_hostname=False")
    assert not warned("rediss://h:1?ssl_cert_reqs=required&db=1")
    for url in ("rediss://[h:1", "redis://h:port", "redis://me:planted/secret@h:1"):
        (found,) = [problem for problem in check_rules(make_config(redis={"url": url})) if problem.key == "redis.url"]
        assert "planted" not in found.render()


# ---- what the processes get -----------------------------------------------------------------------------------


def test_workers_learn_whom_to_trust_and_others_do_not(certificates: Certificates) -> None:
    tokens = RunTokens.fresh()
    given = {role: environment(role, tokens, "https://h:1", "unix:///s", "", str(certificates.ca)) for role in Role}
    trusting = {role for role in Role if "COSMOS_TLS_CA" in given[role]}
    assert trusting == {Role.ROLLOUT, Role.POLICY}
    assert all(given[role]["COSMOS_TLS_CA"] == str(certificates.ca) for role in trusting)
    assert "COSMOS_TLS_CA" not in environment(Role.POLICY, tokens, "http://h:1", "unix:///s", "")


def test_the_address_says_https(certificates: Certificates) -> None:
    assert controller_url(encrypted(certificates), 7) == "https://127.0.0.1:7"
    assert controller_url(encrypted(certificates, host="::"), 7) == "https://[::1]:7"
    assert controller_url(make_config(), 7) == "http://127.0.0.1:7"


def test_the_run_directory_names_the_address_and_no_key(https_controller: ControllerProcess) -> None:
    content = json.loads((https_controller.run_dir / "controller.json").read_text())
    assert sorted(content) == ["job_id", "pid", "url"]
