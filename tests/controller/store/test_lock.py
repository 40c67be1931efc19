"""The lock's decisions: who is certainly dead, and for how long a holder may trust its memory."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

from controller.store.lock import LockHolder, Term, elapsed


def test_a_living_process_and_an_unknown_one_are_not_dead() -> None:
    me = LockHolder.myself("http://here:1")
    assert not me.is_dead()
    assert LockHolder.parse(me.render()) == me
    assert me.key != LockHolder.myself("http://here:1").key
    for unknown in (
        LockHolder.parse(b"no json"),
        LockHolder.parse(b'{"pid": 1, "more": 2}'),
        LockHolder.parse(b"[]"),
    ):
        assert not unknown.is_dead()


def test_a_holder_is_dead_when_its_process_ended_even_if_nobody_looked() -> None:
    me = LockHolder.myself("")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        from controller.store.lock import _start_time

        other = dataclasses.replace(me, pid=child.pid, started=_start_time(child.pid) or "")
        assert not other.is_dead()
        child.kill()
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is None:
            time.sleep(0.01)
        assert other.is_dead(), "a zombie has ended"
    assert other.is_dead()
    assert dataclasses.replace(me, started="1").is_dead(), "another process has its number now"


def test_of_other_machines_boots_and_containers_nothing_is_known() -> None:
    gone = dataclasses.replace(LockHolder.myself(""), started="1")
    assert gone.is_dead()
    assert not dataclasses.replace(gone, boot="another").is_dead()
    assert not dataclasses.replace(gone, namespace="pid:[1]").is_dead()
    assert not dataclasses.replace(gone, boot="", namespace="", started="").is_dead()


def test_a_term_begins_when_a_renewal_was_sent_and_ends_before_the_lock() -> None:
    now = 0.0
    term = Term(10.0, lambda: now)
    assert not term.valid
    now = 100.0
    term.renewed(95.0)
    assert term.valid
    term.renewed(90.0)  # an answer that comes late takes nothing away
    assert term.valid
    now = 102.9
    assert term.valid
    now = 103.1
    assert not term.valid
    assert Term(10.0).interval == 2.5
    assert Term(1.0).interval == 0.25


def test_the_clock_runs() -> None:
    before = elapsed()
    assert elapsed() >= before
