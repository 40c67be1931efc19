"""Python runs this at the start of a process whose `PYTHONPATH` names this folder: Triton's interpreter for vLLM.

vLLM's second model runner is made of Triton kernels, and vLLM turns Triton off where it has no backend for the
processor. Triton's interpreter runs the same kernels in numpy; one of them, which filters by top-k and top-p, is
more than it can do, and vLLM's own function in PyTorch takes its place.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
_KERNELS, _SAMPLER = "vllm.triton_utils.importing", "vllm.v1.sample.ops.topk_topp_sampler"


class _Interpreted:
    """Finds nothing itself: it is asked before a module is imported."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name == _KERNELS:
            from triton.backends import backends

            driver = SimpleNamespace(is_active=lambda: True)
            backends.setdefault("cpu", SimpleNamespace(driver=driver, compiler=None))  # type: ignore[arg-type]
        if name != _SAMPLER:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            module.apply_top_k_top_p_triton = module.apply_top_k_top_p_pytorch  # type: ignore[attr-defined]

        spec.loader.exec_module = execute_and_replace
        return spec


sys.meta_path.insert(0, _Interpreted)  # type: ignore[arg-type]
