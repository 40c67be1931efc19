"""The messages between head and nodes once both are proven: JSON objects, unknown fields refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from launcher.plan.machine import Machine
from launcher.restarts import Role

MOST_TEXT = 4096
Text = Annotated[str, Field(max_length=MOST_TEXT)]
Paths = Annotated[dict[str, Text], Field(max_length=64)]
Facts = Annotated[dict[str, Annotated[str, Field(max_length=256)]], Field(max_length=4096)]


class NodeMessage(BaseModel):
    """Base of all."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Hello(NodeMessage):
    """A machine that wants to be a node. node: its number; None: any that is free. clock: Unix seconds."""

    kind: Literal["hello"] = "hello"
    node: int | None = Field(default=None, ge=1, le=65535)
    host: Text
    address: Text
    pid: int
    clock: float
    machine: Machine
    facts: Facts


class Challenge(NodeMessage):
    """Write a file of this name into each directory that must be shared, and see whether a port can be reached.

    The node has the directories from its own configuration. run: the run's directory.
    """

    kind: Literal["challenge"] = "challenge"
    name: Annotated[str, Field(pattern=r"^\.node-[0-9a-f]{32}$")]
    run: Text
    controller: tuple[Text, int]


class Proof(NodeMessage):
    """faults: by the key of a directory why it cannot be written; `controller` for its port."""

    kind: Literal["proof"] = "proof"
    faults: Paths


class Refusal(NodeMessage):
    """Why this machine is not taken. again: it may try again, its number is still held by a node that is leaving."""

    kind: Literal["refusal"] = "refusal"
    reason: Text
    hint: Text = ""
    again: bool = False


class Welcome(NodeMessage):
    """It is a node. node: its number."""

    kind: Literal["welcome"] = "welcome"
    node: int


class Layout(NodeMessage):
    """The basis of placement. machines: of all nodes, the head's first. rollouts: as for `place_elastic`."""

    kind: Literal["layout"] = "layout"
    machines: Annotated[tuple[Machine, ...], Field(max_length=65536)]
    rollouts: bool


class Start(NodeMessage):
    """Start a process of a replica; the node makes its command line itself (`launcher.nodes.orders`).

    number: of the process on this connection. replica: number among those of its role. env: `orders.SENT`.
    """

    kind: Literal["start"] = "start"
    number: int
    role: Role
    replica: Annotated[int, Field(ge=0)]
    rank: Annotated[int, Field(ge=0)]
    env: Annotated[dict[Text, Text], Field(max_length=16)]


class Signal(NodeMessage):
    """Send a process one of the signals by which a supervisor ends processes: SIGINT, SIGKILL or SIGTERM."""

    kind: Literal["signal"] = "signal"
    number: int
    signal: Literal[2, 9, 15]


class Started(NodeMessage):
    """pid: of the keeper; 0 where it could not be started, which an `Ended` follows."""

    kind: Literal["started"] = "started"
    number: int
    pid: int


class Ended(NodeMessage):
    """See `launcher.processes.host.ProcessEnd`."""

    kind: Literal["ended"] = "ended"
    number: int
    code: int
    lines: tuple[Text, ...] = ()
    out_of_memory: Text = ""

    @classmethod
    def of(cls, number: int, code: int, lines: Iterable[str], out_of_memory: str = "") -> Ended:
        """The end of a process that may have written lines of any length: they are cut to `MOST_TEXT` characters."""
        cut = tuple(line[:MOST_TEXT] for line in lines)
        return cls(number=number, code=code, lines=cut, out_of_memory=out_of_memory[:MOST_TEXT])


class Beat(NodeMessage):
    """A sign of life."""

    kind: Literal["beat"] = "beat"


class Leave(NodeMessage):
    """The node leaves, on purpose."""

    kind: Literal["leave"] = "leave"
    reason: Text


class Finish(NodeMessage):
    """The job is over."""

    kind: Literal["finish"] = "finish"
    outcome: Text
    exit_code: int


AnyMessage = Annotated[
    Hello | Challenge | Proof | Refusal | Welcome | Layout | Start | Signal | Started | Ended | Beat | Leave | Finish,
    Field(discriminator="kind"),
]  # fmt: skip
ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)
