"""`[redis]` with TLS: the server is verified, the client shows its certificate, and the password stays secret."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from redis.asyncio import ConnectionPool, SSLConnection

from controller.server import ServerSettings
from launcher.plan import redis_server
from launcher.plan.redis_server import RedisUnusableError, check, named
from schema.config import RedisConfig
from schema.util.tls import redis_options
from tests.controller.conftest import PATIENT
from tests.controller.drivers import begin, train_step
from tests.security.conftest import PASSWORD, GuardedRedis
from tests.support.certificates import Certificates
from tests.support.controller import TOKENS, make_config, make_run_dir, running_controller


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers wrongly is not asked again for the five seconds that a starting one gets."""
    monkeypatch.setattr(redis_server, "CONNECT_TIMEOUT", 1.0)


@pytest.mark.slow
def test_a_controller_works_on_a_server_with_password_and_mutual_tls(
    tmp_path: Path, guarded_redis: GuardedRedis
) -> None:
    config = make_config(redis={"url": guarded_redis.url, **guarded_redis.files()}, controller=PATIENT)
    run_dir = make_run_dir(tmp_path / "run", config)
    environment = {"COSMOS_REDIS_PASSWORD": PASSWORD}
    with running_controller(run_dir, guarded_redis.url, **environment) as process:
        with process.client("policy") as policy, process.client("rollout") as rollout:
            trainer, replica = begin(policy, rollout)
            assert train_step(trainer, replica, 0).committed_steps == 1
            process.stop()
            process.start()
            assert trainer.commit(0).committed_steps == 1, "it was read back over TLS"
        assert PASSWORD not in process.log()


@pytest.mark.parametrize(
    ("files", "password", "says", "advises"),
    [
        (("tls_ca",), PASSWORD, "cannot be reached", "redis.tls_cert"),
        (("tls_cert", "tls_key"), PASSWORD, "certificate verify failed", "redis.tls_ca"),
        ((), "wrong", "refuses the password", "COSMOS_REDIS_PASSWORD"),
        ((), "", "refuses the password", "COSMOS_REDIS_PASSWORD"),
    ],
)
def test_what_is_missing_is_named_before_the_start(
    guarded_redis: GuardedRedis, files: tuple[str, ...], password: str, says: str, advises: str
) -> None:
    config = RedisConfig(url=guarded_redis.url, **guarded_redis.files(*files))
    server = named(config, {"COSMOS_REDIS_PASSWORD": password} if password else {})
    assert server is not None
    with pytest.raises(RedisUnusableError) as caught:
        check(server, require_durable=False)
    assert says in caught.value.message
    assert advises in caught.value.hint
    assert PASSWORD not in caught.value.message
    assert str(guarded_redis.port) in caught.value.message, "the message names the server"


def test_with_everything_right_nothing_is_said(guarded_redis: GuardedRedis) -> None:
    config = RedisConfig(url=guarded_redis.url, **guarded_redis.files())
    server = named(config, {"COSMOS_REDIS_PASSWORD": PASSWORD})
    assert server is not None
    assert check(server, require_durable=True) == []


def test_a_user_of_the_servers_own_list_comes_in_by_the_address(guarded_redis: GuardedRedis) -> None:
    address = guarded_redis.url.replace("//", f"//default:{PASSWORD}@")
    server = named(RedisConfig(url=address, **guarded_redis.files()), {"COSMOS_REDIS_PASSWORD": "not this one"})
    assert server is not None
    assert check(server, require_durable=True) == []


def test_another_authoritys_server_is_not_spoken_to(
    guarded_redis: GuardedRedis, other_authority: Certificates
) -> None:
    files = {**guarded_redis.files(), "tls_ca": str(other_authority.ca)}
    server = named(RedisConfig(url=guarded_redis.url, **files), {"COSMOS_REDIS_PASSWORD": PASSWORD})
    assert server is not None
    with pytest.raises(RedisUnusableError, match="certificate verify failed"):
        check(server, require_durable=False)


def test_old_tls_is_refused(guarded_redis: GuardedRedis) -> None:
    """redis-py takes the interpreter's default context, whose oldest protocol may be an older one."""
    url = RedisConfig(**guarded_redis.files()).address(guarded_redis.url)
    connection = ConnectionPool.from_url(url, **redis_options(url)).make_connection()
    assert isinstance(connection, SSLConnection)
    assert connection.ssl_context.get().minimum_version is ssl.TLSVersion.TLSv1_2


def test_the_address_carries_the_files_whoever_names_the_server(tmp_path: Path) -> None:
    """The controller takes its address from the environment, its files from the configuration."""
    config = make_config(redis={"url": "rediss://first:1", "tls_ca": "/ca.pem"})
    run_dir = make_run_dir(tmp_path, config)
    environ = {f"COSMOS_TOKEN_{role.upper()}": token for role, token in TOKENS.items()}

    def address(**more: str) -> str:
        return ServerSettings.read(run_dir, None, None, {**environ, **more}).redis_url

    assert address() == "rediss://first:1?ssl_ca_certs=%2Fca.pem"
    assert address(COSMOS_REDIS_URL="rediss://b:2?db=1") == "rediss://b:2?db=1&ssl_ca_certs=%2Fca.pem"
    own = "rediss://b:2?ssl_ca_certs=%2Fown.pem"
    assert address(COSMOS_REDIS_URL=own) == own, "what an address names itself stays"
    assert address(COSMOS_REDIS_URL="unix:///s") == "unix:///s"


def test_files_are_found_from_wherever_the_controller_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path).replace("/", "%2F") in RedisConfig(tls_ca="ca.pem").address("rediss://h:1")
