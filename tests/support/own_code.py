"""Models whose code is not in transformers: it comes with the model, or in a module that registers it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import dynamic_module_utils

CONFIG = """
from transformers import Qwen3Config

class OwnConfig(Qwen3Config):
    model_type = "{name}"
"""
MODEL = """
from transformers import Qwen3ForCausalLM, Qwen3Model
{imported}

class OwnModel(Qwen3Model):
    config_class = OwnConfig

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""
REGISTERS = """
from transformers import AutoConfig, AutoModelForCausalLM

AutoConfig.register("{name}", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
"""


def bring_own_code(folder: Path, name: str = "cosmos-test-own") -> Path:
    """Turn a saved Qwen3 model into one that only its own files can load."""
    (folder / "own_config.py").write_text(CONFIG.format(name=name))
    (folder / "own_model.py").write_text(MODEL.format(imported="from .own_config import OwnConfig"))
    auto_map = {
        "AutoConfig": "own_config.OwnConfig",
        "AutoModel": "own_model.OwnModel",
        "AutoModelForCausalLM": "own_model.OwnForCausalLM",
    }
    _rewrite(folder, model_type=name, auto_map=auto_map)
    return folder


def need_module(folder: Path, directory: Path, module: str) -> Path:
    """Turn a saved Qwen3 model into one that only `module`, a file written to `directory`, makes known."""
    name = module.replace("_", "-")
    code = CONFIG + MODEL.format(imported="") + REGISTERS
    (directory / f"{module}.py").write_text(code.format(name=name))
    _rewrite(folder, model_type=name)
    return folder


def _rewrite(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["OwnForCausalLM"], **changes}
    path.write_text(json.dumps(config))


@contextmanager
def importable(directory: Path) -> Iterator[None]:
    """`directory` on Python's path for a while; what came from it is forgotten afterwards."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(directory)):
                del sys.modules[name]


@contextmanager
def code_kept_in(directory: Path) -> Iterator[None]:
    """transformers copies code that comes with a model to `directory` for a while, not to the user's cache.

    In this process and in those that it starts.
    """
    before, path = dynamic_module_utils.HF_MODULES_CACHE, list(sys.path)
    environment = os.environ.get("HF_MODULES_CACHE")
    dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"] = str(directory)
    try:
        yield
    finally:
        dynamic_module_utils.HF_MODULES_CACHE = before
        del os.environ["HF_MODULES_CACHE"]
        if environment is not None:
            os.environ["HF_MODULES_CACHE"] = environment
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]
