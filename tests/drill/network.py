"""A network of pods: one namespace each, on one bridge. Needs root, iproute2 and nftables.

Addresses are 10.X.C.N: C tells the component, so NetworkPolicies are rules over subnets. The machine itself is
10.X.0.1, which may reach every pod, as a node may; KEDA's namespace is a component of its own on it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from types import TracebackType

COMPONENTS = ("node", "controller", "redis", "policy", "rollout", "scaler", "keda", "service")


class Network:
    """Everything is removed at the end; names are of this process."""

    def __init__(self) -> None:
        self._mark = f"{os.getpid():x}"
        self._bridge = f"cd{self._mark}"
        self._prefix = f"10.{96 + os.getpid() % 96}"
        self._used = dict.fromkeys(COMPONENTS, 0)
        self.namespaces: set[str] = set()

    def subnet(self, component: str) -> str:
        return f"{self._prefix}.{COMPONENTS.index(component)}.0/24"

    def new_address(self, component: str) -> str:
        self._used[component] += 1
        return f"{self._prefix}.{COMPONENTS.index(component)}.{self._used[component] % 254 + 1}"

    @property
    def host(self) -> str:
        """Of the machine."""
        return f"{self._prefix}.0.1"

    @property
    def keda(self) -> str:
        """Of the machine, as KEDA."""
        return f"{self._prefix}.{COMPONENTS.index('keda')}.1"

    def join(self, address: str, rules: str) -> str:
        """A namespace with this address; rules of nftables for what comes in. Its name."""
        name = f"cd{self._mark}-{address.split('.', 2)[2].replace('.', '-')}"
        ip("netns", "add", name)
        self.namespaces.add(name)
        ip("link", "add", self._outside(name), "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("link", "set", self._outside(name), "master", self._bridge, "up")
        ip("-n", name, "addr", "add", f"{address}/16", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        if rules:
            run(["ip", "netns", "exec", name, "nft", "-f", "-"], rules)
        return name

    def leave(self, name: str) -> None:
        self.namespaces.discard(name)
        ip("netns", "del", name)

    def cut(self, name: str) -> None:
        """No packet goes in or out any more, and nobody is told."""
        ip("link", "set", self._outside(name), "down")

    def _outside(self, name: str) -> str:
        return "v" + name.removeprefix("cd")[-14:]

    def move(self, service: str, before: str | None, after: str | None) -> None:
        """Let the address of a Service be that of another pod; None: of no pod."""
        if before in self.namespaces:
            ip("-n", before, "addr", "del", f"{service}/32", "dev", "eth0")
        if after is not None:
            ip("-n", after, "addr", "add", f"{service}/32", "dev", "eth0")
        ip("neigh", "flush", "to", service, "dev", self._bridge)
        for name in self.namespaces:
            ip("-n", name, "neigh", "flush", "to", service)

    def __enter__(self) -> Network:
        ip("link", "add", self._bridge, "type", "bridge")
        for address in (self.host, self.keda):
            ip("addr", "add", f"{address}/16", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in (*(["netns", "del", name] for name in self.namespaces), ["link", "del", self._bridge]):
            subprocess.run(["ip", *line], check=False, capture_output=True)


def rules(host: str, allowed: Iterable[tuple[Sequence[str], int | None]]) -> str:
    """For nftables: new connections come from these subnets to these ports alone, and from the node."""
    opens = "tcp flags & (syn | ack) == syn"
    lines = [
        f"ip saddr {{ {', '.join(subnets)} }}{f' tcp dport {port}' if port else ''} accept"
        for subnets, port in allowed
    ]
    body = "\n    ".join(f"{opens} {line}" for line in [f"ip saddr {host} accept", *lines, "counter drop"])
    return f"""
table inet ingress {{
  chain input {{
    type filter hook input priority 0;
    iifname "lo" accept
    {body}
  }}
}}
"""


def ip(*arguments: str) -> None:
    run(["ip", *arguments])


def run(argv: Sequence[str], text: str = "") -> None:
    ended = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(argv)}: {ended.stderr}"
