"""The resources of this machine, found without importing torch: cores, GPUs, memory, installed packages."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from schema.util.host import count_cores

NVIDIA_SMI_TIMEOUT = 20.0
"""Seconds: the first call after boot loads the driver, which takes up to ten on a large machine."""


Capability = tuple[int, int]
"""Compute capability of a GPU, its generation: (9, 0) is Hopper."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine as placement sees it. `gpus` are values for CUDA_VISIBLE_DEVICES."""

    cores: int
    gpus: tuple[str, ...] = ()
    unused_gpus: int = 0
    """GPUs that are there but that the installed torch cannot use."""
    capabilities: tuple[Capability | None, ...] = ()
    """The generation of each of `gpus`, None where it is unknown; empty where nothing is known."""
    is_here: bool = True
    """Whether it is this machine; else it was described."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The driver's report about one GPU."""

    index: str
    uuid: str
    capability: Capability | None


def find_machine(env: Mapping[str, str]) -> Machine:
    """Look around. CUDA_VISIBLE_DEVICES in `env` limits the GPUs as usual."""
    listed = parse_driver(_query_driver("index,uuid,compute_cap"))
    files = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    gpus = visible_gpus(len(listed) or len(files), env.get("CUDA_VISIBLE_DEVICES"))
    if not torch_has_cuda():
        return Machine(count_cores(), unused_gpus=len(gpus))
    return Machine(count_cores(), gpus, capabilities=tuple(_capability_of(name, listed) for name in gpus))


def visible_gpus(count: int, visible: str | None) -> tuple[str, ...]:
    """GPUs that this job may use: all, or those of CUDA_VISIBLE_DEVICES (CUDA stops at the first wrong one)."""
    if visible is None:
        return tuple(str(i) for i in range(count))
    chosen: list[str] = []
    for name in (part.strip() for part in visible.split(",")):
        is_index = name.isdigit() and int(name) < count
        if not (is_index or name.startswith(("GPU-", "MIG-"))) or count == 0:
            break
        chosen.append(name)
    return tuple(chosen)


def _query_driver(fields: str) -> str:
    """nvidia-smi's table of these fields, sizes in MiB; empty without a driver that answers."""
    import shutil
    import subprocess  # with it 10 ms that a command which looks for no GPU need not spend

    from launcher.plan.credentials import without_secrets

    tool = shutil.which("nvidia-smi")
    if not tool:
        return ""
    query = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            query,
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT,
            check=True,
            env=without_secrets(os.environ),
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout


def parse_driver(text: str) -> list[GpuFacts]:
    """nvidia-smi's table `index, uuid, compute_cap`; a generation that it leaves open is None."""
    facts = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or not parts[0].isdigit():
            continue
        version = re.fullmatch(r"(\d+)\.(\d+)", parts[2])
        facts.append(GpuFacts(parts[0], parts[1], (int(version[1]), int(version[2])) if version else None))
    return facts


def _capability_of(name: str, listed: list[GpuFacts]) -> Capability | None:
    """Return the generation of the GPU that CUDA_VISIBLE_DEVICES names by index or by the beginning of a UUID."""
    return next((fact.capability for fact in listed if fact.index == name or fact.uuid.startswith(name)), None)


def torch_has_cuda() -> bool:
    """Whether the installed torch is a build for GPUs, by its version (`2.13.0+cpu` is not)."""
    import importlib.metadata  # 50 ms

    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def has_module(name: str) -> bool:
    """Whether a module is installed, without importing it or the packages that it is in."""
    top, *inner = name.split(".")
    spec, path = importlib.util.find_spec(top), top
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return False
        path = f"{path}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(path, list(spec.submodule_search_locations))
    return spec is not None


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes. gpus: by the name that CUDA_VISIBLE_DEVICES gives them; missing where it is unknown."""

    host_total: int
    host_free: int
    gpus: Mapping[str, int] = field(default_factory=dict)


GIB = 2**30


@dataclass(frozen=True, slots=True)
class DescribedMachine:
    """Another machine, by options: a laptop plans for a cluster.

    gpus: of each node; None: it has none. gpu_memory: of each GPU, in GiB. cores: None: as many as here.
    host_memory: in GiB. Sizes that are None are unknown, and nothing is too large for them.
    """

    gpus: int | None = None
    gpu_memory: float | None = None
    cores: int | None = None
    host_memory: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no option describes it."""
        return self == DescribedMachine()

    def machine(self) -> Machine:
        """Return it as placement sees it."""
        return Machine(self.cores or count_cores(), tuple(map(str, range(self.gpus or 0))), is_here=False)

    def memory(self) -> MachineMemory:
        """Return its memory, all of it free; 0 where it is unknown."""
        host, each = (int((size or 0) * GIB) for size in (self.host_memory, self.gpu_memory))
        return MachineMemory(host, host, {str(index): each for index in range(self.gpus or 0)} if each else {})


def find_capacity(gpus: tuple[str, ...]) -> MachineMemory:
    """How much memory there is. gpus: those that the job may use; none needs the driver."""
    total, free = host_memory(
        Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    )
    return MachineMemory(total, free, parse_gpus(_query_driver("index,uuid,memory.total")) if gpus else {})


def host_memory(meminfo: Path, limit: Path, used: Path) -> tuple[int, int]:
    """Total and free bytes of this process's control group, or of the machine if that is less; 0 if unknown."""
    try:
        lines = re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return 0, 0
    sizes = {name: int(number) * 1024 for name, number in lines}
    total, free = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
    try:
        most, now = int(limit.read_text()), int(used.read_text())
    except (OSError, ValueError):  # no control group, or "max"
        return total, free
    return min(total, most), min(free, max(0, most - now))


def parse_gpus(text: str) -> dict[str, int]:
    """`0, GPU-…, 81559` (mebibytes) -> bytes by index and by UUID."""
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) == 3 and fields[2].isdigit():
            sizes[fields[0]] = sizes[fields[1]] = int(fields[2]) * 2**20
    return sizes
