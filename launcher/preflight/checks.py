"""What is checked of the machine before any process starts: all problems at once, one message each.

The configuration itself (types, rules, files, columns) is checked by `schema.config.load_config`; this is about
ports, packages, GPUs, Redis and disk, which differ from machine to machine. `cosmos-launch validate` shows
the same findings as warnings, since the job may run elsewhere.
"""

from __future__ import annotations

import ast
import errno
import importlib.util
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from launcher.paths import absolute
from launcher.plan import redis_server
from launcher.plan.credentials import without_secrets
from launcher.plan.machine import Capability, Machine, has_module
from launcher.plan.nsight import check_nsight
from launcher.plan.placement import PlacementError, needs, place_elastic
from launcher.plan.tls import check_encryption
from launcher.preflight.memory import size_text
from schema.config import BUILTIN_REWARDS, Config, Problem, local_path, overrides
from schema.config.backends import BACKENDS
from schema.config.layout import policy_layout
from schema.config.model_facts import BrokenModelError, config_file, read_config, read_facts
from schema.config.rules.engine import impossible_without_gpus
from schema.config.rules.model import unread_models
from schema.config.rules.profiler import absent_ranks
from schema.config.sections.model_keys import ModelKeys

LOOK_TIMEOUT = 20.0
MIN_FREE_BYTES = 64 * 1024 * 1024
"""Room for logs, prepared data and the state of the ledger of a small job."""

MOST_CPU_RANKS = 2
"""One trainer and one engine: a job with more of them is written for GPUs and takes too long on cores."""


@dataclass(slots=True)
class Findings:
    """Problems end the start, warnings are shown."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


def check_machine(
    config: Config, machine: Machine, *, joins: bool = False, rollouts: bool = True
) -> Findings:
    """Everything that can be found without the network; takes milliseconds.

    joins: the controller runs elsewhere. rollouts: whether the job starts its rollout replicas itself.
    """
    findings = Findings()
    findings.problems += missing_packages(config, has_module)
    if config.is_evaluation:  # reads a file and runs reward functions: no port, GPU or Redis
        _check_disk(config, findings)
        return findings
    findings.warnings += unread_models(config)
    findings.problems += check_engine_version(config, installed_vllm())
    findings.problems += check_engine_options(config)
    findings.problems += check_overrides(config)
    findings.problems += check_nsight(config)
    if not joins:
        findings.problems += _port_problems(config.controller.host, config.controller.port)
    problems, warnings = check_encryption(config)
    findings.problems += problems
    findings.warnings += warnings
    _check_gpus(config, machine, findings, rollouts=rollouts)
    _check_disk(config, findings)
    if not config.redis.url and redis_server.valkey_binary() is None:
        message = "the embedded Valkey is not installed for this machine"
        findings.problems.append(Problem("redis.url", message, "", redis_server.MISSING_HINT))
    return findings


def check_redis(config: Config, env: Mapping[str, str]) -> Findings:
    """Whether the named server answers and keeps what it is given. May take `CONNECT_TIMEOUT` seconds."""
    findings, server = Findings(), redis_server.named(config.redis, env)
    if server is None or config.is_evaluation:
        return findings
    try:
        warnings = redis_server.check(server, config.controller.require_durable_redis)
    except redis_server.RedisUnusableError as problem:
        findings.problems.append(Problem("redis.url", problem.message, None, problem.hint))
    else:
        hint = "set `appendonly yes` and `maxmemory-policy noeviction`"
        findings.warnings += [Problem("redis.url", text, None, hint) for text in warnings]
    return findings


def unset_variables(config: Config, env: Mapping[str, str]) -> list[Problem]:
    """Variables that `reward.environment` and teachers name and the environment of this command does not have."""
    names = {f"reward.environment[{index}]": name for index, name in enumerate(config.reward.environment)}
    for index, teacher in enumerate(config.teacher):
        if teacher.key_variable:
            names[f"teacher[{index}].key_variable"] = teacher.key_variable
    hint = "export {}=… before the start, or leave the name out"
    return [
        Problem(key, f"{name} is not set in the environment", name, hint.format(name))
        for key, name in names.items()
        if name not in env
    ]


# ---- packages ---------------------------------------------------------------------------------------------


def _reward_packages(names: Iterable[str]) -> list[tuple[str, str]]:
    """The packages of built-in rewards, and the extra that brings them."""
    return [
        (package, "rollout") for package in sorted({BUILTIN_REWARDS.get(name, "") for name in names} - {""})
    ]


def missing_packages(config: Config, installed: Callable[[str], bool]) -> list[Problem]:
    """What the chosen parts need and is not installed, with the extra that brings it."""
    problems: list[Problem] = []
    wanted = [("torch", "policy"), ("transformers", "policy")]
    if config.is_evaluation:
        wanted = _reward_packages(config.evaluation.reward_weights)
    elif config.is_grpo:
        wanted += [("transformers", "rollout")]
        wanted += _reward_packages({**config.grpo.reward_weights, **config.validation.reward_weights})
    problems += missing_optimizers(config, installed)
    problems += missing_kernels(config, installed)
    problems += missing_trackers(config, installed)
    missing: dict[str, str] = {}
    for module, extra in wanted:
        if not installed(module):
            missing.setdefault(module, extra)
    for module, extra in missing.items():
        hint = f"pip install '.[{extra}]' in the checkout of cosmos-launch"
        problems.append(
            Problem("", f"the package {module} is not installed, and this job needs it", hint=hint)
        )
    generates = config.is_grpo and not config.is_evaluation
    name, engine = config.rollout.backend, config.rollout.engine
    if generates and engine.package not in missing and not installed(engine.package):
        other = next(other for other in BACKENDS if other != name)
        hint = (
            f"pip install '.[{engine.extra}]' in the checkout of cosmos-launch{engine.install_note}, "
            f'or write rollout.backend = "{other}"'
        )
        problems.append(Problem("rollout.backend", f"{engine.package} is not installed", name, hint))
    return problems


def missing_optimizers(config: Config, installed: Callable[[str], bool]) -> Iterator[Problem]:
    """Optimizers whose library is not installed."""
    sections = {} if config.is_evaluation else {"train": config.train.optm_name}
    if config.is_grpo and config.critic.enable:
        sections["critic"] = config.critic.optm_name
    for section, name in sections.items():
        if name.endswith("8bit") and not installed("torchao"):
            hint = f"pip install '.[8bit]' in the checkout of cosmos-launch, or write \"{name[:-4]}\""
            yield Problem(
                f"{section}.optm_name", "torchao is not installed, which has this optimizer", name, hint
            )


FLASH_PACKAGES = {
    2: ("flash_attn", "flash-attn"),
    3: ("flash_attn_interface", "flash-attn-3"),
    4: ("flash_attn", "flash-attn-4"),
}
"""Version -> the module that it brings, and its package."""


def missing_kernels(config: Config, installed: Callable[[str], bool]) -> Iterator[Problem]:
    """Kernels whose package is not installed."""
    if config.is_evaluation:
        return
    wanted: list[tuple[str, Any, str, str]] = []
    if config.train.fp8.enable_fp8:
        wanted.append(
            ("train.fp8.enable_fp8", True, "torchao", "pip install '.[8bit]' in the checkout, or write false")
        )
    if config.policy.enable_liger_kernel:
        hint = "pip install '.[liger]' in the checkout, or write false"
        wanted.append(("policy.enable_liger_kernel", True, "liger_kernel", hint))
    if (version := config.train.fa_version) is not None:
        module, package = FLASH_PACKAGES[version]
        wanted.append(
            ("train.fa_version", version, module, f"install {package} for your CUDA, or leave it out")
        )
    if config.is_grpo:
        for key in ("rollout.vllm_use_flashinfer", "rollout.sampling_config.use_flashinfer"):
            if attrgetter(key)(config):
                wanted.append((key, True, "flashinfer", "pip install flashinfer-python, or write false"))
    for key, value, module, hint in wanted:
        if not installed(module):
            yield Problem(
                key, f"the package {module} is not installed, whose kernels it asks for", value, hint
            )


def missing_compiler(config: Config, machine: Machine, env: Mapping[str, str]) -> Iterator[Problem]:
    """What torch.compile needs to make code: for a GPU Triton and a C compiler, for a CPU a C++ compiler."""
    sections = {
        "train": config.train.compile,
        "critic": config.is_grpo and config.critic.enable and config.critic.compile,
    }
    names, variable, kind = ["gcc", "clang", "cc"], "CC", "C"
    if not machine.gpus:
        names, variable, kind = ["g++"], "CXX", "C++"
    chosen = env.get(variable)
    found = any(shutil.which(name, path=env.get("PATH")) for name in ([chosen] if chosen else names))
    for key in (f"{section}.compile" for section, on in sections.items() if on):
        hint = f"write {key} = false, or install one"
        if not found:
            message = f"true needs a {kind} compiler, and {chosen or ', '.join(names)} is not on the PATH"
            yield Problem(key, message, True, hint)
        elif machine.gpus and not has_module("triton"):
            yield Problem(
                key, "true needs Triton on a GPU, and the package triton is not installed", True, hint
            )


def missing_trackers(config: Config, installed: Callable[[str], bool]) -> list[Problem]:
    """Trackers whose packages are not installed, here or where `logging.tracker_python` says."""
    key, python = "logging.logger", config.logging.tracker_python
    if python and len(config.logging.logger) > 1:
        without = without_secrets(os.environ)
        look = "import importlib.util as u, sys; sys.exit(sum(u.find_spec(n) is None for n in sys.argv[1:]))"

        def installed(name: str) -> bool:
            looks = [python, "-P", "-c", look, name]
            return subprocess.run(looks, check=False, timeout=LOOK_TIMEOUT, env=without).returncode == 0

        try:
            installed("pydantic")
        except (OSError, subprocess.TimeoutExpired) as error:
            return [
                Problem("logging.tracker_python", f"{python} does not run: {error}", python, "name a Python")
            ]
    return [
        Problem(key, f"the package {name} is not installed", name, f"pip install '{name}', or leave it out")
        for name in config.logging.logger
        if name != "console" and not installed(name)
    ]


# ---- port -------------------------------------------------------------------------------------------------


def _port_problems(host: str, port: int) -> list[Problem]:
    key = "controller.port"
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        hint = "write 127.0.0.1, 0.0.0.0 or an address of this machine"
        return [Problem("controller.host", f"{host} cannot be resolved: {error}", host, hint)]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                hint = "write 127.0.0.1, 0.0.0.0 or an address of this machine"
                return [Problem("controller.host", f"{host} is not an address of this machine", host, hint)]
            hint = "end the program that listens there, choose another port, or 0 for any free one"
            what = "in use" if error.errno == errno.EADDRINUSE else f"not available: {error.strerror}"
            return [Problem(key, f"port {port} on {host} is {what}", port, hint)]
    return []


# ---- GPUs -------------------------------------------------------------------------------------------------


def _check_gpus(config: Config, machine: Machine, findings: Findings, *, rollouts: bool) -> None:
    try:
        _, reserve = place_elastic(config, *[machine] * config.placement.nodes, rollouts=rollouts)
        findings.warnings += _room_to_scale(config, len(reserve), rollouts=rollouts)
    except PlacementError as error:
        findings.problems.append(error.problem)
    findings.problems += check_hardware(config, machine)
    findings.problems += check_engine_hardware(config, machine)
    if not machine.gpus:
        findings.problems += impossible_without_gpus(config)
    findings.problems += missing_compiler(config, machine, os.environ)
    if config.train.compile and not machine.gpus:
        message = "true compiles for minutes at the start, and on a CPU a step is hardly faster for it"
        hint = "write train.compile = false"
        findings.warnings.append(Problem("train.compile", message, True, hint))
    if machine.unused_gpus:
        message = f"the installed torch is built without CUDA: {machine.unused_gpus} GPUs stay unused"
        findings.warnings.append(Problem("", message, hint="install a CUDA build of torch"))
    nodes = config.placement.nodes
    wanted = needs(config, len(machine.gpus) * nodes, rollouts=rollouts)
    if policy_layout(config).size is None:  # else the configuration has been checked for it
        findings.problems += absent_ranks(config, wanted.policy_ranks)
    ranks = wanted.policy_replicas * wanted.policy_ranks + wanted.rollout_replicas * wanted.rollout_gpus
    if not machine.gpus and ranks > MOST_CPU_RANKS * nodes:
        message = f"{ranks} ranks of trainers and engines would share {machine.cores} cores: this machine has no GPU"
        hint = "start it where the GPUs are, or write policy.parallelism.dp_shard_size = 1 and "
        hint += "rollout.parallelism.n_init_replicas = 1"
        findings.warnings.append(Problem("", message, hint=hint))
    processes = wanted.policy_replicas * wanted.policy_ranks + wanted.rollout_replicas
    threads, fair = config.launcher.cpu_threads, max(1, machine.cores * nodes // processes)
    if not machine.gpus and threads and threads > fair:
        message = f"{processes} worker processes of {threads} threads share {machine.cores} cores"
        hint = f"leave it out: {fair} each, which is faster"
        findings.warnings.append(Problem("launcher.cpu_threads", message, threads, hint))


def _room_to_scale(config: Config, reserve: int, *, rollouts: bool) -> Iterator[Problem]:
    scale, first = config.autoscale, config.rollout.parallelism.n_init_replicas
    if scale.enable and rollouts and config.is_grpo and first + reserve < scale.max_replicas:
        message = f"{scale.max_replicas} rollout replicas may be needed, and there is room for {first + reserve} here"
        hint = f"write {first + reserve}, or let others join from elsewhere (cosmos-launch join)"
        if policy_layout(config).size is None:
            hint = (
                "write a number for policy.parallelism.dp_shard_size: -1 takes all GPUs that the start leaves"
            )
        yield Problem("autoscale.max_replicas", message, scale.max_replicas, hint)


# ---- disk -------------------------------------------------------------------------------------------------


def _check_disk(config: Config, findings: Findings) -> None:
    key, target = "train.output_dir", Path(absolute(config.train.output_dir))
    existing = next(path for path in (target, *target.parents) if os.path.lexists(path))
    if not existing.is_dir():
        hint = "choose another directory"
        findings.problems.append(Problem(key, f"{existing} is not a directory", str(target), hint))
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        hint = "choose another directory, or change its permissions"
        findings.problems.append(Problem(key, f"{existing} cannot be written to", str(target), hint))
        return
    model = 0 if config.is_evaluation else _model_bytes(config.policy.model_name_or_path)
    free = shutil.disk_usage(existing).free
    # With deltas two anchors at a time, and deltas that together are about one more: `keep` is an upper bound.
    versions = 0 if config.weight_sync.store else config.weight_sync.keep + 1
    least, roomy = MIN_FREE_BYTES + (1 + min(versions, 1)) * model, MIN_FREE_BYTES + (versions + 1) * model
    if free < roomy:
        what = "weight versions and export take" if versions else "the export takes"
        message = f"{size_text(free)} free in {existing}, and {what} about {size_text(roomy)}"
        found = Problem(key, message, str(target), "free some room or choose another disk")
        (findings.problems if free < least else findings.warnings).append(found)


def _model_bytes(name: str) -> int:
    """Bytes of a local model's weights; 0 for a model on the hub."""
    path = local_path(name)
    try:
        return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path else 0
    except OSError:
        return 0


# ---- numerics and kernels ----------------------------------------------------------------------------------

# fp8 and FlashAttention exist from some generation of GPUs on. A GPU whose generation is unknown is taken to be
# able: a wrong refusal would be worse than the worker's own error.

ANY_LATER: Capability = (99, 0)
SWITCHES: dict[str, tuple[str, Capability]] = {
    "train.fp8.enable_fp8": ("fp8 training", (8, 9)),  # Ada and Hopper are the first that multiply fp8
    "policy.enable_liger_kernel": ("a Liger kernel", (7, 0)),  # Volta is the first that Triton compiles for
    "rollout.vllm_use_flashinfer": ("flashinfer", (7, 5)),  # Turing
    "rollout.sampling_config.use_flashinfer": ("flashinfer", (7, 5)),
}
"""Key that is true or false -> what it switches on, and the first generation of GPUs that can do it."""
FLASH_ATTENTION: dict[int, tuple[Capability, Capability]] = {
    2: ((8, 0), ANY_LATER),
    3: ((9, 0), (9, 9)),
    4: ((9, 0), ANY_LATER),
}
"""Version -> first and last generation: 2 from Ampere on, 3 Hopper alone, 4 from Hopper on."""


def check_hardware(config: Config, machine: Machine) -> list[Problem]:
    """Numerics that this machine's GPUs cannot do, one problem each; without GPUs none of them."""
    found = []
    for key, (what, first) in SWITCHES.items():
        if attrgetter(key)(config) and (config.is_grpo or not key.startswith("rollout.")):
            found.append(_unable(machine, key, True, what, first, ANY_LATER, f"write {key} = false"))
    if (version := config.train.fa_version) is not None:
        what, (first, last) = f"FlashAttention {version}", FLASH_ATTENTION[version]
        found.append(_unable(machine, "train.fa_version", version, what, first, last, "leave it out"))
    return [problem for problem in found if problem is not None]


def _unable(
    machine: Machine, key: str, value: bool | int, what: str, first: Capability, last: Capability, remedy: str
) -> Problem | None:
    """The problem of a value that needs GPUs from `first` to `last`; None where the machine has them."""
    if not machine.gpus:
        message = f"{what} needs a GPU, and this machine has none that the installed torch can use"
        return Problem(key, message, value, remedy)
    unable = [one for one in machine.capabilities if one is not None and not first <= one <= last]
    if not unable:
        return None
    needed = _text(first) + (" or later" if last == ANY_LATER else f" to {_text(last)}")
    message = (
        f"{what} needs GPUs of compute capability {needed}, and this machine has one of {_text(min(unable))}"
    )
    return Problem(key, message, value, remedy)


def check_engine_hardware(config: Config, machine: Machine) -> list[Problem]:
    """What an engine does on GPUs alone; with GPUs nothing."""
    rollout, engine = config.rollout, config.rollout.engine
    if machine.gpus or not config.is_grpo:
        return []
    problems, mesh = [], rollout.parallelism
    none = "and this machine has none that the installed torch can use"
    if mesh.ep_size > 1 and not engine.one_device:
        key = "rollout.parallelism.ep_size"
        message = f"{engine.title} shares experts among GPUs (its kernel for a CPU takes all of them), {none}"
        hint = f"write {key} = 1: tp_size = {mesh.tp_size} cuts each expert"
        problems.append(Problem(key, message, mesh.ep_size, hint))
    elif mesh.dp_shard_size > 1 and not engine.one_device and _has_experts(config):
        key = "rollout.parallelism.dp_shard_size"
        message = f"copies of {engine.title} exchange the tokens of a mixture of experts among GPUs, {none}"
        hint = f"write {key} = 1, and a larger rollout.parallelism.n_init_replicas"
        problems.append(Problem(key, message, mesh.dp_shard_size, hint))
    if rollout.quantization in engine.quantisations:
        key, able = "rollout.quantization", sorted(engine.cpu_quantisations)
        hint = f'write {key} = "none"'
        if rollout.quantization not in able:
            message = f"{engine.title} quantises so on a GPU, {none}"
            problems.append(
                Problem(key, message, rollout.quantization, f"{hint}, or one of {', '.join(able)} on a CPU")
            )
        elif not _has_amx():
            message = (
                f"{engine.title} computes with it on a GPU or a CPU with AMX tiles, and this CPU has none"
            )
            problems.append(Problem(key, message, rollout.quantization, hint))
    return problems


def _has_experts(config: Config) -> bool:
    policy = config.policy
    try:
        facts = read_facts(policy.model_name_or_path, policy.model_revision, policy.override_config)
    except BrokenModelError:
        return False
    return facts is not None and bool(facts.experts)


def _has_amx() -> bool:
    """Whether this machine's CPU multiplies tiles; one of which nothing is known is taken to be able."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return True


def _text(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


# ---- pass-through options ----------------------------------------------------------------------------------

# `rollout.engine_kwargs` and `rollout.sampling_config.extra` hand names to vLLM that only its own version knows.
# Importing vLLM takes seconds; the names are annotated fields of two classes, so its source is parsed instead. The
# engine checks again when it starts.

_DISTRIBUTION = re.compile(r"vllm(?:_cpu)?-(\d[^-]*)\.dist-info")
ENGINE_CLASSES = ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))
SAMPLING_CLASSES = ("sampling_params.py", ("SamplingParams",))


def check_engine_options(config: Config) -> list[Problem]:
    """Names that the installed engine does not know; nothing if it is not installed here."""
    if not config.is_grpo or not config.rollout.engine.own_options:
        return []
    passed = [
        ("rollout.engine_kwargs", config.rollout.engine_kwargs, ENGINE_CLASSES),
        ("rollout.sampling_config.extra", config.rollout.sampling_config.extra, SAMPLING_CLASSES),
    ]
    if not any(options for _, options, _ in passed) or (root := installed_vllm()) is None:
        return []
    problems = []
    for key, options, (file, classes) in passed:
        if options:
            problems += unknown_names(key, options, fields(root / file, classes))
    return problems


def check_overrides(config: Config) -> list[Problem]:
    """Entries of override_config that neither the model's config.json nor transformers' class for it has.

    Nothing is said of a model that is not here, nor of one that comes with its own code: its worker checks again.
    """
    policy, critic = config.policy, config.critic
    name = policy.model_name_or_path
    models: list[tuple[str, ModelKeys, str]] = [("policy", policy, name)]
    if config.is_grpo and critic.enable:
        models.append(("critic", critic, critic.model_name_or_path or name))
    problems: list[Problem] = []
    for section, model, name in models:
        if model.override_config:
            known = _config_entries(name, model.model_revision)
            problems += (
                overrides.unknown(f"{section}.override_config", model.override_config, known) if known else ()
            )
    return problems


def _config_entries(name: str, revision: str | None) -> set[str]:
    """Names of a model's configuration; empty where they cannot be known."""
    spec = importlib.util.find_spec("transformers")
    try:
        file = config_file(name, revision)
        written = read_config(file) if file is not None else {}
    except BrokenModelError:
        return set()
    kind = str(written.get("model_type", "")).replace("-", "_")
    if spec is None or spec.origin is None or "auto_map" in written:
        return set()
    root = Path(spec.origin).parent
    own = fields(root / "models" / kind / f"configuration_{kind}.py")
    return {*written, *own, *fields(root / "configuration_utils.py")} if own else set()


def check_engine_version(config: Config, root: Path | None) -> list[Problem]:
    """A vLLM of which nothing is known: its parts that updates of weights rest on may be others.

    root: where its source lies; nothing is said where it is not here.
    """
    tried = config.rollout.engine.tried
    if not config.is_grpo or not tried or root is None:
        return []
    names = (_DISTRIBUTION.fullmatch(path.name) for path in root.parent.glob("vllm*.dist-info"))
    found = next((match[1] for match in names if match), None)
    if found is None or any(found == version or found.startswith(f"{version}.") for version in tried):
        return []
    message = f"vLLM {found} is installed, and updates of weights were tried with {' and '.join(tried)} alone"
    hint = f'install vllm=={tried[-1]}.*, or write rollout.backend = "transformers"'
    return [Problem("rollout.backend", message, config.rollout.backend, hint)]


def installed_vllm() -> Path | None:
    """Where vLLM's source lies."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def fields(path: Path, classes: Collection[str] | None = None) -> frozenset[str]:
    """Public annotated fields of these classes, or of all in the file; empty if it is not what we know."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    return frozenset(
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes)
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not line.target.id.startswith("_")
    )


def unknown_names(key: str, options: Mapping[str, Any], known: Collection[str]) -> list[Problem]:
    """One problem for each name that is not known. Without known names nothing can be said."""
    if not known:
        return []
    problems = []
    for name, value in options.items():
        if name not in known:
            import difflib

            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see the engine's own documentation"
            message = f"the installed vLLM has no option {name!r}"
            problems.append(Problem(f"{key}.{name}", message, value, hint))
    return problems
