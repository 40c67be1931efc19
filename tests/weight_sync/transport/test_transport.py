"""The collective transport: whoever dies, stalls, lies or comes late, every host gets the right weights in bounded
time, from the trainer where that works and from the store where not; and each says which it was."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from schema.wire.weights import FileEntry, Offer, Publication
from tests.support.effort import combinations
from tests.support.relay import Relay
from tests.support.waiting import PATIENCE, until
from tests.weight_sync.versions import RemoteStore, Versions, same
from weight_sync import WeightError
from weight_sync.host.host_copy import HostCopy
from weight_sync.manifest import piece_of
from weight_sync.stores import DirectoryStore, Store
from weight_sync.transport import DirectStore, Sender, TransferError, TransferOutcome, own_address
from weight_sync.transport.group import Chunk, Line, RoundGathering, chunks_of
from weight_sync.transport.wire import Deadline, Status, ask, greet, read_request, receive, refuse

pytestmark = pytest.mark.slow

HERE = "127.0.0.1"
SHORT = 0.5
"""Seconds, where a time-out is what happens."""


def offered(publication: Publication, sender: Sender, **changes: object) -> Publication:
    """The publication as the controller hands it out."""
    offer = sender.offer(piece_of(publication)).model_copy(update=changes)
    return publication.model_copy(update={"offer": offer})


@contextmanager
def sending(store: Store, timeout: float = PATIENCE, carrier: LineCarrier | None = None) -> Iterator[Sender]:
    sender = Sender(store, HERE, timeout, carrier)
    try:
        yield sender
    finally:
        sender.close()


@contextmanager
def relayed(
    publication: Publication, at: int, then: Callable[[bytes], bytes | None], *, only: int | None = None
) -> Iterator[Publication]:
    """The publication behind a network that breaks."""
    assert publication.offer is not None
    relay = Relay(publication.offer.port, at, then, only=only)
    try:
        yield publication.model_copy(update={"offer": publication.offer.model_copy(update={"port": relay.port})})
    finally:
        relay.close()


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path / "store")


@pytest.fixture
def nothing(tmp_path: Path) -> DirectoryStore:
    """A store that holds nothing: what arrives has come from the trainer."""
    return DirectoryStore(tmp_path / "nothing")


def brought(
    place: Path, store: DirectStore, publication: Publication, expected: dict[str, torch.Tensor]
) -> TransferOutcome:
    """Bring a host's copy to a publication; that it holds exactly these weights is part of it."""
    copy = HostCopy(place, store, lock_timeout=PATIENCE)
    store.expect(publication)
    weights = copy.advance(publication, patience=0.0)
    with weights.reading():
        assert same(weights.tensors(), expected)
    copy.close()
    return store.outcome()


# ---- what goes well ---------------------------------------------------------------------------------------


def test_full_versions_and_deltas_come_without_the_store(
    tmp_path: Path, versions: Versions, nothing: DirectoryStore
) -> None:
    store = DirectStore(nothing, PATIENCE)
    copy = HostCopy(tmp_path / "copy", store, lock_timeout=PATIENCE)
    with sending(versions.store) as sender:
        for version in range(6):
            publication = offered(versions.newest, sender)
            store.expect(publication)
            weights = copy.advance(publication, patience=0.0)
            with weights.reading():
                assert same(weights.tensors(), versions.weights[version])
            outcome = store.outcome()
            assert outcome.fallback is None
            assert outcome.n_bytes > publication.n_bytes  # with its manifest
            versions.next()
        until(lambda: sender.served.files >= 12, "the sender to count what it has sent")
        assert sender.served.failed == 0
    copy.close()


def test_a_host_that_joins_late_takes_the_rest_from_the_store(tmp_path: Path, versions: Versions) -> None:
    for _ in range(6):
        versions.next()
    store = DirectStore(DirectoryStore(versions.root), PATIENCE)
    with sending(versions.store) as sender:
        outcome = brought(tmp_path / "copy", store, offered(versions.newest, sender), versions.weights[6])
    assert outcome.fallback is None
    assert outcome.files > 0


def test_a_distant_store_is_read_once_for_all_hosts(
    tmp_path: Path, versions: Versions, nothing: DirectoryStore
) -> None:
    distant = RemoteStore(versions.root, tmp_path / "notes")
    with sending(distant) as sender:
        publication = offered(versions.newest, sender)
        for host in ("one", "two", "three"):
            direct = DirectStore(nothing, PATIENCE)
            assert brought(tmp_path / host, direct, publication, versions.weights[0]).files > 1
    asked = (tmp_path / "notes").read_text().split()
    assert len(asked) == len(set(asked))


def test_other_versions_are_the_stores(tmp_path: Path, versions: Versions) -> None:
    old, new = versions.newest, versions.next()
    store = DirectStore(DirectoryStore(versions.root), PATIENCE)
    with sending(versions.store) as sender:
        store.expect(offered(new, sender))
        assert bytes(store.read(old.uri)) == bytes(versions.store.read(old.uri))
        assert store.outcome() == TransferOutcome(files=0, n_bytes=0, fallback=None)


# ---- what goes wrong --------------------------------------------------------------------------------------


def refusals(versions: Versions, publication: Publication, store: DirectStore, place: Path) -> str:
    outcome = brought(place, store, publication, versions.weights[-1])
    assert outcome.fallback is not None
    return outcome.fallback


def test_without_an_offer_the_store_serves(tmp_path: Path, versions: Versions) -> None:
    store = DirectStore(DirectoryStore(versions.root), PATIENCE)
    assert "not offered" in refusals(versions, versions.newest, store, tmp_path / "copy")


def test_a_wrong_token_gets_nothing(tmp_path: Path, versions: Versions) -> None:
    with sending(versions.store) as sender:
        publication = offered(versions.newest, sender, token=secrets.token_hex(16))
        store = DirectStore(DirectoryStore(versions.root), PATIENCE)
        assert "refused the token" in refusals(versions, publication, store, tmp_path / "copy")
        assert sender.served.files == 0


def test_an_offer_is_over_when_the_next_one_is_made(tmp_path: Path, versions: Versions) -> None:
    with sending(versions.store) as sender:
        old = offered(versions.newest, sender)
        offered(versions.newest, sender)
        store = DirectStore(DirectoryStore(versions.root), PATIENCE)
        assert "another version" in refusals(versions, old, store, tmp_path / "old")
        withdrawn = offered(versions.newest, sender)
        sender.withdraw()
        assert "another version" in refusals(versions, withdrawn, store, tmp_path / "withdrawn")


def test_a_trainer_that_is_gone_is_asked_more_and_more_rarely(versions: Versions, tmp_path: Path) -> None:
    with sending(versions.store) as sender:
        publication = offered(versions.newest, sender)
    store = DirectStore(DirectoryStore(versions.root), PATIENCE)
    reasons = []
    for _ in range(8):
        store.expect(publication)
        store.read(publication.uri)
        reasons.append(store.outcome().fallback or "")
    tried = ["reached at" in reason for reason in reasons]
    assert tried == [True, True, False, True, False, False, False, True]
    assert all(reasons)


@pytest.mark.parametrize(("what", "at"), combinations(["cut", "stalled", "flipped"], [3, 40, 300, 2000, 100_000]))
def test_a_bad_network_costs_only_the_detour(tmp_path: Path, versions: Versions, what: str, at: int) -> None:
    """In the greeting, the answer, the manifest, the file's header, its tensors."""

    def then(data: bytes) -> bytes | None:
        if what == "cut":
            raise ConnectionResetError
        return bytes([data[0] ^ 1]) + data[1:] if what == "flipped" else None

    with sending(versions.store) as sender, relayed(offered(versions.newest, sender), at, then) as publication:
        timeout = SHORT if what == "stalled" else PATIENCE
        store = DirectStore(DirectoryStore(versions.root), timeout)
        why = refusals(versions, publication, store, tmp_path / "copy")
    if what == "stalled":
        assert "within 0.5 s" in why
    # The next version comes from the trainer again.
    with sending(versions.store) as sender:
        publication = offered(versions.next(), sender)
        store = DirectStore(DirectoryStore(versions.root), PATIENCE)
        assert brought(tmp_path / "copy", store, publication, versions.weights[-1]).fallback is None


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "damaged"),
        (lambda data: data + b"x", r"would have \d+ bytes instead of \d+"),
    ],
    ids=["other bits", "another size"],
)
def test_damage_in_the_trainers_copy_is_found(
    tmp_path: Path, versions: Versions, spoil: Callable[[bytes], bytes], why: str
) -> None:
    class Damaged(DirectoryStore):
        def read(self, key: str) -> memoryview:
            data = bytes(super().read(key))
            return memoryview(data if key.endswith(".json") else spoil(data))

    store = DirectStore(DirectoryStore(versions.root), PATIENCE)
    with sending(Damaged(versions.root)) as bad:
        assert re.search(why, refusals(versions, offered(versions.newest, bad), store, tmp_path / "copy"))


def test_a_trainer_without_threads_hangs_up_and_serves_again(
    tmp_path: Path, versions: Versions, nothing: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "weights-send":
            raise RuntimeError("can't start new thread")
        start(thread)

    with sending(versions.store) as sender:
        publication = offered(versions.newest, sender)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refusing)
            store = DirectStore(versions.store, PATIENCE)
            outcome = brought(tmp_path / "one", store, publication, versions.weights[0])
            assert "hung up" in (outcome.fallback or "")
        outcome = brought(tmp_path / "two", DirectStore(nothing, PATIENCE), publication, versions.weights[0])
        assert outcome.fallback is None


def test_a_distant_store_that_hangs_at_the_trainer_holds_no_replica_up(tmp_path: Path, versions: Versions) -> None:
    free = threading.Event()

    class Hanging(RemoteStore):
        def download(self, key: str, to: Path, n_bytes: int | None = None) -> int:
            free.wait()
            return super().download(key, to, n_bytes)

    try:
        with sending(Hanging(versions.root, tmp_path / "notes"), timeout=SHORT) as sender:
            publication = offered(versions.newest, sender)
            for host in ("one", "two"):
                store = DirectStore(DirectoryStore(versions.root), SHORT)
                assert refusals(versions, publication, store, tmp_path / host)
            assert sender.served.files == 0
    finally:
        free.set()


def test_with_neither_trainer_nor_store_it_is_an_error(
    tmp_path: Path, versions: Versions, nothing: DirectoryStore
) -> None:
    with sending(versions.store) as sender:
        publication = offered(versions.newest, sender)
    store = DirectStore(nothing, PATIENCE)
    with pytest.raises(WeightError):
        brought(tmp_path / "copy", store, publication, versions.weights[0])


def test_strangers_hold_nobody_up(tmp_path: Path, versions: Versions, nothing: DirectoryStore) -> None:
    with sending(versions.store) as sender:
        publication = offered(versions.newest, sender)
        silent = [socket.create_connection((HERE, sender.port)) for _ in range(20)]
        for line in silent[:10]:
            line.sendall(secrets.token_bytes(500))
        outcome = brought(tmp_path / "copy", DirectStore(nothing, PATIENCE), publication, versions.weights[0])
        assert outcome.fallback is None
        for line in silent:
            line.close()


def test_only_files_of_the_offered_version_are_handed_out(versions: Versions) -> None:
    with sending(versions.store) as sender:
        offer = sender.offer(piece_of(versions.newest))
        for name in ("../x", "a/b", ".hidden", "", "nothing.safetensors"):
            with pytest.raises(TransferError):
                said(offer, name)


def said(offer: Offer, name: str, most: int = 1 << 40) -> bytes:
    deadline = Deadline(PATIENCE)
    with socket.create_connection((offer.address, offer.port)) as line:
        n_bytes = ask(line, offer.round, bytes.fromhex(offer.token), name, most, deadline)
        return b"".join(map(bytes, receive(line, n_bytes, deadline)))


def test_more_bytes_than_announced_are_refused(versions: Versions) -> None:
    with sending(versions.store) as sender:
        offer = sender.offer(piece_of(versions.newest))
        size = len(said(offer, "manifest.json"))
        assert size > 10
        with pytest.raises(TransferError, match="more than the"):
            said(offer, "manifest.json", most=size - 1)


def test_who_does_not_know_the_token_cannot_play_the_trainer() -> None:
    offer = Offer(address=HERE, port=1, round=1, token=secrets.token_hex(16))
    with socket.create_server((HERE, 0)) as listener:

        def pretend() -> None:
            line, _ = listener.accept()
            with line:
                deadline = Deadline(PATIENCE)
                read_request(line, greet(line, deadline), lambda _: b"", deadline)
                line.sendall(bytes([0]) + (5).to_bytes(8, "little") + bytes(32) + b"wrong")

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(TransferError, match="does not have the token"):
            said(offer.model_copy(update={"port": listener.getsockname()[1]}), "manifest.json")
        thread.join()


def test_a_request_cannot_be_used_twice() -> None:
    """What one connection said is worth nothing on the next: the trainer's nonce is another."""
    token, recorded = secrets.token_bytes(16), b""
    near, far = socket.socketpair()
    with near, far:
        deadline = Deadline(PATIENCE)
        nonce = greet(near, deadline)

        def ask_once() -> None:
            with pytest.raises(TransferError, match="another version"):
                ask(far, 1, token, "f", 9, deadline)

        asking = threading.Thread(target=ask_once)
        asking.start()
        recorded = near.recv(1 << 16)
        refuse(near, Status.OVER, deadline)
        asking.join()
    assert len(recorded) == 16 + 8 + 1 + 1 + 32
    for again, expected in ((nonce, False), (secrets.token_bytes(16), True)):
        near, far = socket.socketpair()
        with near, far:
            far.sendall(recorded)
            found = read_request(near, again, lambda _: token, Deadline(PATIENCE))
            assert (found is Status.REFUSED) is expected


# ---- to several at once -----------------------------------------------------------------------------------


class LineCarrier:
    """A fabric that is the line itself; it breaks for those who say so, or before it is joined."""

    def __init__(self, *, fails: bool = False, works: bool = True) -> None:
        self.fails, self.works = fails, works
        self.members: list[int] = []

    def send(self, lines: Sequence[Line], chunks: Sequence[Chunk], read: Callable[[str], memoryview]) -> None:
        self.members.append(len(lines))
        if self.fails:
            raise RuntimeError("the fabric is torn")
        for line in lines:
            for chunk in chunks:
                data = read(chunk.file)[chunk.offset : chunk.offset + chunk.n_bytes]
                line.tell({"name": chunk.name, "data": bytes(data).hex()})
            assert line.hear() == {"ok": True}

    def receive(self, line: Line, chunks: Sequence[Chunk], write: Callable[[Chunk, memoryview], object]) -> None:
        self.members.append(1)
        for chunk in chunks:
            told = line.hear()
            assert told["name"] == chunk.name
            write(chunk, memoryview(bytes.fromhex(told["data"])))
        if self.fails:
            raise EOFError("it ends here")
        line.tell({"ok": True})


def test_chunks_cover_all_bytes() -> None:
    files = [FileEntry(name=name, n_bytes=size, hash="") for name, size in (("a", 10), ("b", 0), ("c", 3))]
    chunks = chunks_of(files, 4)
    found = [(chunk.name, chunk.n_bytes) for chunk in chunks]
    assert found == [("a:0", 4), ("a:4", 4), ("a:8", 2), ("c:0", 3)]


def test_several_hosts_are_served_at_once(tmp_path: Path, versions: Versions, nothing: DirectoryStore) -> None:
    carrier = LineCarrier()
    hosts = ("a", "b", "c")

    def follow(publication: Publication, host: str) -> TransferOutcome:
        store = DirectStore(nothing, PATIENCE, LineCarrier())
        return brought(tmp_path / host, store, publication, versions.weights[-1])

    with sending(versions.store, carrier=carrier) as sender, ThreadPoolExecutor(len(hosts)) as pool:
        for _ in range(3):
            publication = offered(versions.newest, sender)
            assert publication.offer is not None
            assert publication.offer.fabric == "nccl"
            outcomes = list(pool.map(partial(follow, publication), hosts))
            assert [outcome.fallback for outcome in outcomes] == [None] * 3
            versions.next(full=True)
    assert len(carrier.members) == 3
    assert set(carrier.members) <= {1, 2, 3}


@pytest.mark.parametrize("side", ["trainer", "host", "neither works", "host cannot"])
def test_when_the_fabric_fails_files_come_one_by_one(
    tmp_path: Path, versions: Versions, nothing: DirectoryStore, side: str
) -> None:
    carrier = LineCarrier(fails=side == "trainer", works=side != "neither works")
    mine = LineCarrier(fails=side == "host", works=side != "host cannot")
    store = DirectStore(nothing, PATIENCE, mine)
    with sending(versions.store, carrier=carrier) as sender:
        outcome = brought(tmp_path / "copy", store, offered(versions.newest, sender), versions.weights[0])
    assert outcome.fallback is None
    assert outcome.n_bytes > versions.newest.n_bytes
    tried = {"trainer": (1, 1), "host": (1, 1), "neither works": (0, 0), "host cannot": (0, 0)}[side]
    assert (len(carrier.members), len(mine.members)) == tried


def test_who_comes_late_is_not_taken_in() -> None:
    sent: list[int] = []
    gathering = RoundGathering(lambda lines: sent.append(len(lines)), usual=1)
    near, far = socket.socketpair()
    with near, far:
        line = Line(near, Deadline(PATIENCE))
        gathering.attend(line)
        with pytest.raises(TransferError, match="fixed"):
            gathering.attend(line)
    assert sent == [1]
    assert gathering.members == 1


# ---- processes that die -----------------------------------------------------------------------------------

Child = tuple[BaseProcess, Connection]


def trainer_main(root: Path, pipe: Connection) -> None:
    """Publishes and offers one more version whenever it is asked to."""
    versions = Versions(root, weights={"w": torch.arange(40_000_000, dtype=torch.int16)})
    sender = Sender(versions.store, HERE, PATIENCE)
    publication = versions.newest
    while True:
        pipe.send(offered(publication, sender).model_dump_json())
        pipe.recv()
        publication = versions.next({"w": versions.weights[-1]["w"] + 1}, full=True)


def replica_main(place: Path, fallback: Path, timeout: float, pipe: Connection) -> None:
    """Brings its copy to what it is told, and says what it holds then and how that came."""
    store = DirectStore(DirectoryStore(fallback), timeout)
    copy = HostCopy(place, store, lock_timeout=PATIENCE)
    while True:
        publication = Publication.model_validate_json(pipe.recv())
        store.expect(publication)
        weights = copy.advance(publication, patience=0.0)
        outcome = store.outcome()
        pipe.send((weights.publication.content_hash, outcome.fallback))


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    context, children = get_context("forkserver"), []
    context.set_forkserver_preload([__name__])  # PyTorch is imported once for all of them

    def begin(main: Callable[..., None], *arguments: object) -> Child:
        near, far = context.Pipe()
        child = context.Process(target=main, args=(*arguments, far), daemon=True)
        child.start()
        far.close()
        children.append(child)
        return child, near

    yield begin
    for child in children:
        child.kill()
        child.join()


def told(pipe: Connection) -> object:
    assert pipe.poll(PATIENCE), "a process says nothing"
    return pipe.recv()


def test_a_replica_that_is_killed_holds_up_no_other(tmp_path: Path, start: Callable[..., Child]) -> None:
    nothing = tmp_path / "nothing"
    _, trainer = start(trainer_main, tmp_path / "store")
    replicas = [start(replica_main, tmp_path / name, nothing, PATIENCE) for name in ("a", "b", "c")]
    doomed, pipe = replicas[2]
    publication = Publication.model_validate_json(str(told(trainer)))

    def kill(_: bytes) -> bytes:
        assert doomed.pid is not None
        os.kill(doomed.pid, signal.SIGKILL)
        raise ConnectionResetError

    with relayed(publication, 10_000_000, kill) as cut:
        pipe.send(cut.model_dump_json())
        for _, other in replicas[:2]:
            other.send(publication.model_dump_json())
        for _, other in replicas[:2]:
            assert told(other) == (publication.content_hash, None)
        doomed.join(PATIENCE)
        assert doomed.exitcode == -signal.SIGKILL
    # Another one in its place, on the same host, and the next version for all of them.
    replicas[2] = start(replica_main, tmp_path / "c", nothing, PATIENCE)
    trainer.send("next")
    publication = Publication.model_validate_json(str(told(trainer)))
    for _, other in replicas:
        other.send(publication.model_dump_json())
    for _, other in replicas:
        assert told(other) == (publication.content_hash, None)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_trainer_is_gone_the_store_has_it(
    tmp_path: Path, start: Callable[..., Child], how: signal.Signals
) -> None:
    """In the middle of a file, killed or standing still."""
    child, trainer = start(trainer_main, tmp_path / "store")
    timeout = PATIENCE if how == signal.SIGKILL else SHORT
    _, replica = start(replica_main, tmp_path / "copy", tmp_path / "store", timeout)
    publication = Publication.model_validate_json(str(told(trainer)))

    def strike(_: bytes) -> bytes | None:
        assert child.pid is not None
        os.kill(child.pid, how)
        if how == signal.SIGKILL:
            child.join()
            raise ConnectionResetError
        return None

    with relayed(publication, 10_000_000, strike) as struck:
        replica.send(struck.model_dump_json())
        content, why = told(replica)  # type: ignore[misc]
        assert content == publication.content_hash
        assert ("within" in why) == (how == signal.SIGSTOP)
    # Whoever comes now is told at once, or waits no longer than the time-out.
    replica.send(publication.model_copy(update={"id": publication.id + 1}).model_dump_json())
    content, *_ = told(replica)  # type: ignore[misc]
    assert content == publication.content_hash


def test_replicas_of_one_host_fetch_once(tmp_path: Path, versions: Versions, nothing: DirectoryStore) -> None:
    with sending(versions.store) as sender:
        publication = offered(versions.newest, sender)
        stores = [DirectStore(nothing, PATIENCE) for _ in range(3)]
        copies = [HostCopy(tmp_path / "copy", store, lock_timeout=PATIENCE) for store in stores]

        def follow(i: int) -> None:
            stores[i].expect(publication)
            copies[i].advance(publication, patience=0.0)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(follow, range(3)))
        outcomes = [store.outcome() for store in stores]
        assert [outcome.fallback for outcome in outcomes] == [None] * 3
        assert sorted(outcome.files > 0 for outcome in outcomes) == [False, False, True]
        for copy in copies:
            copy.close()


# ---- where the trainer listens ----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_where_all_is_on_one_machine_nobody_else_can_connect(host: str) -> None:
    assert own_address("http://127.0.0.1:8000", host) == "127.0.0.1"


def test_a_controller_open_to_others_has_a_trainer_open_to_others() -> None:
    address = own_address("http://127.0.0.1:8000", "0.0.0.0")
    with socket.create_server((address, 0)):  # one of this machine, the loopback where there is no network
        pass


def test_a_controller_that_has_no_address_is_told() -> None:
    with pytest.raises(OSError):
        own_address("http://nowhere.invalid:8000", "0.0.0.0")
