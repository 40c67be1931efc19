"""Python runs this at the start of a process whose `PYTHONPATH` names this folder: Triton's interpreter for vLLM.

vLLM's second model runner is made of Triton kernels, and vLLM turns Triton off where it has no backend for the
processor. Triton's interpreter runs the same kernels in numpy; one of them, which filters by top-k and top-p, is
more than it can do, and vLLM's own function in PyTorch takes its place. A step is scheduled while the one before is
on its way, as on accelerators, which vLLM leaves out on a CPU.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what is compiled would ask Triton's driver, which is not there


def _replace_filter(module: Any) -> None:
    module.apply_top_k_top_p_triton = module.apply_top_k_top_p_pytorch


def _schedule_ahead(module: Any) -> None:
    platform = module.CpuPlatform
    check = platform.check_and_update_config

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = classmethod(check_and_update_config)


def _claim_backend() -> None:
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends.setdefault("cpu", SimpleNamespace(driver=driver, compiler=None))


CHANGES: dict[str, Callable[[Any], None]] = {
    "vllm.v1.sample.ops.topk_topp_sampler": _replace_filter,
    "vllm.platforms.cpu": _schedule_ahead,
}
"""What is done to a module once it is imported."""


class _Importing:
    """Is asked for each module before it is imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name == "vllm.triton_utils.importing":
            _claim_backend()
        if name not in CHANGES:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, _Importing)
