"""The store against a real Valkey: nothing answered that is not written, and nobody writes after a successor."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from redis.asyncio import ConnectionPool, Redis

from controller.store import Fenced, HistoryLost, Saved, StateStore, StoreUnavailable, Table, UnsuitableServer
from controller.store.fence import FencedConnection
from controller.store.server_check import ServerFacts, sync_always
from tests.controller.conftest import in_event_loop
from tests.support.valkey import ValkeyServer, running_valkey
from tests.support.waiting import PATIENCE


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    """A server of one's own, to be killed."""
    with running_valkey() as server:
        yield server


async def open_store(valkey: ValkeyServer, job: str = "job", **options: bool) -> tuple[StateStore, Saved]:
    return await StateStore.open(valkey.url, prefix="test", job_id=job, **options)  # type: ignore[arg-type]


async def until_available(store: StateStore) -> None:
    while not store.available:  # noqa: ASYNC110 - the store reconnects by itself
        await asyncio.sleep(0.01)


def put(store: StateStore, name: str, value: object) -> None:
    store.enqueue({(Table.STEPS, name): partial(dict, {"value": value})})


@in_event_loop
async def test_what_was_flushed_is_read_back(shared_valkey: ValkeyServer) -> None:
    store, saved = await open_store(shared_valkey, "readback")
    assert all(not rows for rows in saved.values())
    put(store, "a", 1)
    put(store, "b", 2)
    await store.flush()
    store.enqueue({(Table.STEPS, "a"): None}, {("g", 0): b"x" * 100, ("g", 1): b"y"}, [("g", 1)])
    await store.flush_durably()
    assert await store.get_payloads([("g", 0), ("g", 1), ("h", 0)]) == [b"x" * 100, None, None]
    await store.close()
    again, saved = await open_store(shared_valkey, "readback")
    assert saved[Table.STEPS] == {"b": {"value": 2}}
    assert await again.get_payloads([("g", 0)]) == [b"x" * 100]
    await again.close()


@in_event_loop
async def test_jobs_on_one_server_do_not_see_each_other(shared_valkey: ValkeyServer) -> None:
    one, _ = await open_store(shared_valkey, "one")
    put(one, "a", 1)
    await one.flush()
    other, saved = await open_store(shared_valkey, "other")
    assert saved[Table.STEPS] == {}
    put(one, "b", 2)
    await one.flush()
    await one.close()
    await other.close()


@in_event_loop
async def test_concurrent_writers_share_transactions(shared_valkey: ValkeyServer) -> None:
    store, _ = await open_store(shared_valkey, "group")

    async def write(i: int) -> None:
        put(store, str(i), i)
        await store.flush()

    await asyncio.gather(*(write(i) for i in range(200)))
    with shared_valkey.client() as client:
        assert client.hlen("test:group:steps") == 200
        assert int(client.get("test:group:seq") or 0) < 20
    await store.close()


@in_event_loop
async def test_a_repeat_without_changes_waits_for_the_write_it_repeats(shared_valkey: ValkeyServer) -> None:
    store, _ = await open_store(shared_valkey, "repeat")
    with shared_valkey.client() as client:
        client.client_pause(int(1000 * PATIENCE), all=False)  # writes wait
        put(store, "a", 1)
        first = asyncio.create_task(store.flush())
        await asyncio.sleep(0.1)  # now it is on its way, and nothing is pending
        repeat = asyncio.create_task(store.flush())
        await asyncio.sleep(0.1)
        assert not repeat.done()
        client.client_unpause()
        await asyncio.gather(first, repeat)
        assert client.hexists("test:repeat:steps", "a")
    await store.close()


@in_event_loop
async def test_a_successor_fences_its_predecessor(shared_valkey: ValkeyServer) -> None:
    old, _ = await open_store(shared_valkey, "fence")
    put(old, "a", 1)
    await old.flush()
    new, saved = await open_store(shared_valkey, "fence", replace=True)
    assert saved[Table.STEPS] == {"a": {"value": 1}}
    put(old, "a", "from the dead")
    with pytest.raises(StoreUnavailable):
        await old.flush()
    assert isinstance(await old.fatal, Fenced)
    with pytest.raises(StoreUnavailable):
        old.require()
    with shared_valkey.client() as client:
        assert client.hget("test:fence:steps", "a") == b'{"value":1}'
    put(new, "a", 2)
    await new.flush()
    await old.close()
    await new.close()


@in_event_loop
async def test_an_epoch_raised_just_before_it_is_watched_again_fences_too(shared_valkey: ValkeyServer) -> None:
    """The gap between EXEC and the WATCH after it, hit exactly: the transaction raises the epoch itself."""
    pool = ConnectionPool.from_url(shared_valkey.url)
    fence = FencedConnection(pool, "gap:epoch", "gap:seq")
    with shared_valkey.client() as client:
        client.set("gap:epoch", 1)
    fence.fencing_token = 1
    await fence.execute([("INCR", "gap:epoch")])
    with pytest.raises(Fenced):
        await fence.execute([("SET", "gap:late", 1)])
    with shared_valkey.client() as client:
        assert not client.exists("gap:late")
    await fence.close()
    await pool.disconnect()


@in_event_loop
async def test_an_idle_controller_finds_its_successor_by_renewing_the_lock(shared_valkey: ValkeyServer) -> None:
    old, _ = await open_store(shared_valkey, "idle")
    await old.renew_lock()
    assert old.alive_at is None
    new, _ = await open_store(shared_valkey, "idle", replace=True)
    assert new.alive_at is not None
    with pytest.raises(StoreUnavailable):
        await old.renew_lock()
    assert isinstance(await old.fatal, Fenced)
    await old.close()
    await new.close()


@in_event_loop
async def test_a_store_that_is_closed_as_soon_as_it_is_open_gives_its_lock_back(valkey: ValkeyServer) -> None:
    """The lock is about to be renewed then, and what sends that forgets the first cancellation."""
    store, _ = await open_store(valkey)
    await store.close()
    with valkey.client() as client:
        assert client.get("test:job:lock") is None


@in_event_loop
async def test_a_restart_of_the_server_loses_nothing(valkey: ValkeyServer) -> None:
    store, _ = await open_store(valkey)
    put(store, "a", 1)
    await store.flush()
    valkey.stop(signal.SIGKILL)
    put(store, "b", 2)
    with pytest.raises(StoreUnavailable):
        await store.flush()
    with pytest.raises(StoreUnavailable):
        store.require()
    assert not store.available
    await asyncio.get_running_loop().run_in_executor(None, valkey.start)
    await until_available(store)
    put(store, "c", 3)
    await store.flush()
    await store.close()
    again, saved = await open_store(valkey)
    assert saved[Table.STEPS] == {"a": {"value": 1}, "b": {"value": 2}, "c": {"value": 3}}
    await again.close()


@in_event_loop
async def test_a_server_that_hangs_is_said_to(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = await open_store(valkey)
    monkeypatch.setattr("controller.store.fence.REPLY_TIMEOUT", 0.05)
    valkey.send_signal(signal.SIGSTOP)
    put(store, "a", 1)
    with pytest.raises(StoreUnavailable, match="does not take writes: no answer in time"):
        await store.flush()
    monkeypatch.undo()
    valkey.send_signal(signal.SIGCONT)
    await until_available(store)
    await store.close()


@in_event_loop
async def test_a_server_that_comes_back_with_an_older_state_ends_the_controller(valkey: ValkeyServer) -> None:
    store, _ = await open_store(valkey)
    for i in range(3):
        put(store, str(i), i)
        await store.flush()
    with valkey.client() as client:
        client.set("test:job:seq", 1)
        client.client_kill_filter(_type="normal", skipme=True)
    put(store, "late", 1)
    with pytest.raises(StoreUnavailable):
        await store.flush()
    error = await store.fatal
    assert isinstance(error, HistoryLost)
    assert "transaction 1 of" in str(error)
    await store.close()


@in_event_loop
async def test_an_emptied_server_ends_the_controller(valkey: ValkeyServer) -> None:
    store, _ = await open_store(valkey)
    put(store, "a", 1)
    await store.flush()
    with valkey.client() as client:
        client.flushall()
    put(store, "b", 1)
    with pytest.raises(StoreUnavailable):
        await store.flush()
    assert isinstance(await store.fatal, HistoryLost)
    await store.close()


@in_event_loop
async def test_a_full_server_suspends_and_then_goes_on(valkey: ValkeyServer) -> None:
    store, _ = await open_store(valkey)
    with valkey.client() as client:
        client.config_set("maxmemory", 1)
        put(store, "a", 1)
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            await store.flush()
        client.config_set("maxmemory", 0)
    await until_available(store)
    with valkey.client() as client:
        assert client.hget("test:job:steps", "a") == b'{"value":1}'
    await store.close()


@in_event_loop
async def test_a_row_that_cannot_be_written_ends_the_controller_instead_of_hanging(
    shared_valkey: ValkeyServer,
) -> None:
    store, _ = await open_store(shared_valkey, "broken")
    put(store, "a", object())
    with pytest.raises(StoreUnavailable):
        await store.flush()
    assert "cannot go on" in str(await store.fatal)
    await store.close()


@in_event_loop
async def test_no_server_is_an_error_that_names_the_address_without_the_password() -> None:
    url = "redis://me:hidden@127.0.0.1:1/0"
    with pytest.raises(StoreUnavailable) as refused:
        await StateStore.open(url, prefix="p", job_id="j", patience=0.1)
    assert "redis://127.0.0.1:1/0" in str(refused.value)
    assert "hidden" not in str(refused.value)


@in_event_loop
async def test_a_server_that_may_forget_is_a_warning_or_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with running_valkey("--appendonly", "no", "--maxmemory-policy", "allkeys-lru") as server:
        store, _ = await open_store(server)
        put(store, "a", 1)
        await store.flush_durably()
        await store.close()
        assert "append-only file is off" in caplog.text
        assert "allkeys-lru" in caplog.text
        with pytest.raises(UnsuitableServer, match="append-only file is off"):
            await open_store(server, require_durable=True)


def test_old_servers_are_refused_and_older_ones_cannot_wait_for_their_file() -> None:
    info = {"redis_version": "6.0.16", "aof_enabled": 1, "maxmemory_policy": "noeviction"}
    with pytest.raises(UnsuitableServer, match=r"6\.0\.16"):
        ServerFacts.from_info(info).check(require_durable=False)
    old = ServerFacts.from_info({**info, "redis_version": "7.0.15"})
    assert not old.can_wait_for_file
    with pytest.raises(UnsuitableServer, match="appendfsync always"):
        old.check(require_durable=True)
    replace(old, syncs_always=True).check(require_durable=True)
    assert ServerFacts.from_info({**info, "redis_version": "7.2.4"}).can_wait_for_file


@in_event_loop
async def test_a_server_that_cannot_tell_is_made_to_sync_every_write() -> None:
    with running_valkey("--appendfsync", "everysec") as valkey:
        async with Redis.from_url(valkey.url) as client:
            facts = replace(ServerFacts.from_info(await client.info()), version=(7, 0, 15))
            assert not facts.keeps_what_it_acknowledges
            told = await sync_always(client, facts)
            assert told.keeps_what_it_acknowledges
            assert (await client.config_get("appendfsync"))["appendfsync"] == "always"
            newer = ServerFacts.from_info(await client.info())
            assert await sync_always(client, newer) is newer
