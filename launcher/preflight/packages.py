"""Checks of what is installed: packages, compilers, and options that the installed engine accepts."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from launcher.plan.credentials import without_secrets
from launcher.plan.machine import Machine, has_module
from schema.config import BUILTIN_REWARDS, Config, Problem, overrides
from schema.config.backends import BACKENDS
from schema.config.model_facts import BrokenModelError, config_file, read_config
from schema.config.sections.model_keys import ModelKeys

LOOK_TIMEOUT = 20.0


def _reward_packages(names: Iterable[str]) -> list[tuple[str, str]]:
    """The packages of built-in rewards, and the extra that brings them."""
    return [(package, "rollout") for package in sorted({BUILTIN_REWARDS.get(name, "") for name in names} - {""})]


def missing_packages(config: Config, installed: Callable[[str], bool]) -> list[Problem]:
    """Packages that the chosen parts need and that are not installed, with the extra that brings them."""
    problems: list[Problem] = []
    required = [("torch", "policy"), ("transformers", "policy")]
    if config.is_evaluation:
        required = _reward_packages(config.evaluation.reward_weights)
    elif config.generates:
        required += [("transformers", "rollout")]
        required += _reward_packages({*config.training_reward_weights, *config.validation_reward_names})
    problems += missing_optimizers(config, installed)
    problems += missing_kernels(config, installed)
    problems += missing_trackers(config, installed)
    missing: dict[str, str] = {}
    for module, extra in required:
        if not installed(module):
            missing.setdefault(module, extra)
    for module, extra in missing.items():
        hint = f"pip install '.[{extra}]' in the checkout of cosmos-launch"
        problems.append(Problem("", f"the package {module} is not installed, and this job needs it", hint=hint))
    generates = config.generates and not config.is_evaluation
    name, engine = config.rollout.backend, config.rollout.engine
    if generates and engine.package not in missing and not installed(engine.package):
        other_backend = next(other_backend for other_backend in BACKENDS if other_backend != name)
        hint = (
            f"pip install '.[{engine.extra}]' in the checkout of cosmos-launch{engine.install_note}, "
            f'or write rollout.backend = "{other_backend}"'
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
            yield Problem(f"{section}.optm_name", "torchao is not installed, which has this optimizer", name, hint)


FLASH = {
    2: ("flash_attn.flash_attn_interface", "pip install flash-attn --no-build-isolation"),
    3: (
        "flash_attn_interface",
        "pip install --no-build-isolation 'git+https://github.com/Dao-AILab/flash-attention.git#subdirectory=hopper'",
    ),
    4: ("flash_attn.cute", "pip install --pre 'flash-attn-4[cu13]'"),
}
"""Version -> a module that it alone brings (2 and 4 share a package), and how it is installed: PyPI has the
sources of 2, which take an hour of all cores to build, nothing of 3, and pre-releases of 4, which is Python."""


def missing_kernels(config: Config, installed: Callable[[str], bool]) -> Iterator[Problem]:
    """Kernels whose package is not installed."""
    if config.is_evaluation:
        return
    switches = [
        ("train.fp8.enable_fp8", "torchao", "pip install '.[8bit]' in the checkout, or write false"),
        ("policy.enable_liger_kernel", "liger_kernel", "pip install '.[liger]' in the checkout, or write false"),
    ]
    if config.generates:
        hint = "pip install flashinfer-python, or write false"
        switches += [("rollout.vllm_use_flashinfer", "flashinfer", hint)]
        switches += [("rollout.sampling_config.use_flashinfer", "flashinfer", hint)]
    required: list[tuple[str, Any, str, str]] = [
        (key, True, module, hint) for key, module, hint in switches if attrgetter(key)(config)
    ]
    if (version := config.train.fa_version) is not None:
        module, command = FLASH[version]
        required.append(("train.fa_version", version, module, f"{command}, or leave it out"))
    for key, value, module, hint in required:
        if not installed(module):
            yield Problem(key, f"the package {module} is not installed, whose kernels it asks for", value, hint)


C_COMPILERS = ("gcc", "clang", "cc")
"""Triton takes the first of them that is there."""


def has_compiler(names: Sequence[str], variable: str, env: Mapping[str, str]) -> bool:
    """Whether one of these compilers is on the PATH, or the one that a variable names in their place."""
    chosen = env.get(variable)
    return any(shutil.which(name, path=env.get("PATH")) for name in ([chosen] if chosen else names))


def missing_compiler(config: Config, machine: Machine, env: Mapping[str, str]) -> Iterator[Problem]:
    """Compilers that torch.compile needs: for a GPU Triton and a C compiler, for a CPU a C++ compiler."""
    sections = {
        "train": config.train.compile,
        "critic": config.is_grpo and config.critic.enable and config.critic.compile,
    }
    names, variable, kind = (C_COMPILERS, "CC", "C") if machine.gpus else (("g++",), "CXX", "C++")
    chosen, present = env.get(variable), has_compiler(names, variable, env)
    for key in (f"{section}.compile" for section, on in sections.items() if on):
        hint = f"write {key} = false, or install one"
        if not present:
            message = f"true needs a {kind} compiler, and {chosen or ', '.join(names)} is not on the PATH"
            yield Problem(key, message, True, hint)
        elif machine.gpus and not has_module("triton"):
            yield Problem(key, "true needs Triton on a GPU, and the package triton is not installed", True, hint)


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
            return [Problem("logging.tracker_python", f"{python} does not run: {error}", python, "name a Python")]
    return [
        Problem(key, f"the package {name} is not installed", name, f"pip install '{name}', or leave it out")
        for name in config.logging.logger
        if name != "console" and not installed(name)
    ]


# ---- pass-through options ----------------------------------------------------------------------------------

# `rollout.engine_kwargs` and `rollout.sampling_config.extra` hand names to vLLM that only its own version has.
# Importing vLLM takes seconds; the names are annotated fields of two classes, so its source is parsed instead. The
# engine checks again when it starts.

_DISTRIBUTION = re.compile(r"vllm(?:_cpu)?-(\d[^-]*)\.dist-info")
ENGINE_CLASSES = ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs"))
SAMPLING_CLASSES = ("sampling_params.py", ("SamplingParams",))


def check_engine_options(config: Config) -> list[Problem]:
    """Names that the installed engine does not have; nothing if it is not installed here."""
    if not config.generates or not config.rollout.engine.own_options:
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
            config_entries = _config_entries(name, model.model_revision)
            problems += (
                overrides.unknown(f"{section}.override_config", model.override_config, config_entries)
                if config_entries
                else ()
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
    declared = fields(root / "models" / kind / f"configuration_{kind}.py")
    return {*written, *declared, *fields(root / "configuration_utils.py")} if declared else set()


def check_engine_version(config: Config, root: Path | None) -> list[Problem]:
    """A vLLM of which nothing is known: its parts that updates of weights rest on may be others.

    root: where its source lies; nothing is said where it is not here.
    """
    tried = config.rollout.engine.tried
    if not config.generates or not tried or root is None:
        return []
    names = (_DISTRIBUTION.fullmatch(path.name) for path in root.parent.glob("vllm*.dist-info"))
    installed = next((match[1] for match in names if match), None)
    if installed is None or any(installed == version or installed.startswith(f"{version}.") for version in tried):
        return []
    message = f"vLLM {installed} is installed, and updates of weights were tried with {' and '.join(tried)} alone"
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
