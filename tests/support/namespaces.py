"""Network namespaces of this machine as machines of their own: a bridge, an address for each, and lost packets."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence
from types import TracebackType

_networks = itertools.count()


class Namespaces:
    """Needs root, iproute2 and nftables. Everything is removed at the end; names and networks are of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        mark = f"{os.getpid():x}{next(_networks)}"
        self._names = [f"cos{mark}-{n}" for n in range(count)]
        self._bridge = f"cb{mark}"
        self._network = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"

    def address(self, number: int) -> str:
        return f"{self._network}.{number + 1}"

    @property
    def outside(self) -> str:
        """The address at which they reach this machine."""
        return f"{self._network}.254"

    def command(self, number: int, *argv: str) -> list[str]:
        """A command line that runs there. All but the network is this machine's, cgroups too, which slurmd needs."""
        return ["nsenter", f"--net=/run/netns/{self._names[number]}", *argv]

    def lose(self, percent: int) -> None:
        """Drop this share of what each of them receives, at random."""
        rules = f"""
table inet loss {{
  chain input {{
    type filter hook input priority 0;
    iifname "eth0" numgen random mod 100 < {percent} counter drop
  }}
}}
"""
        for number in range(self.count):
            _run(self.command(number, "nft", "-f", "-"), rules)

    def lost(self, number: int) -> int:
        """Packets that were dropped there."""
        listed = _run(self.command(number, "nft", "list", "chain", "inet", "loss", "input")).split()
        return int(listed[listed.index("packets") + 1])

    def __enter__(self) -> Namespaces:
        try:
            self._ip("link", "add", self._bridge, "type", "bridge")
            self._ip("addr", "add", f"{self.outside}/24", "dev", self._bridge)
            self._ip("link", "set", self._bridge, "up")
            for number, name in enumerate(self._names):
                self._ip("netns", "add", name)
                outside = f"{self._bridge}v{number}"
                self._ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
                self._ip("link", "set", outside, "master", self._bridge, "up")
                self._ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
                self._ip("-n", name, "link", "set", "eth0", "up")
                self._ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for line in (*(["netns", "del", name] for name in self._names), ["link", "del", self._bridge]):
            subprocess.run(["ip", *line], check=False, capture_output=True)

    @staticmethod
    def _ip(*arguments: str) -> None:
        _run(["ip", *arguments])


def _run(argv: Sequence[str], text: str = "") -> str:
    ended = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(argv)}: {ended.stderr}"
    return ended.stdout
