"""Keys of every model that is loaded: where its tokenizer is, whose code may run, what is overridden."""

from __future__ import annotations

from schema.config.base import FreeTable, Section
from schema.config.key import cosmos_key, key


# fmt: off
class ModelKeys(Section):
    """How a model and its tokenizer are loaded."""

    model_revision: str | None = cosmos_key(None, "Revision of a model on the hub.",
        acts="engine argument: `revision` of the engine, and of the trained model.", example="main")
    tokenizer_name_or_path: str | None = key(None,
        "Tokenizer: a local directory or a name on the hub. Unset: the model's own.", min_length=1,
        acts="engine argument: `tokenizer` of the engine; tokens of the data.", example="Qwen/Qwen3-0.6B")
    trust_remote_code: bool = key(False,
        "Whether Python code that comes with the model or its tokenizer may run on these machines.",
        acts="engine argument: `trust_remote_code` of the engine and of every load.")
    external_modules: list[str] = key([],
        "Python modules imported before the model is loaded, to register model classes.",
        acts="process: Modules that a process has imported.", example=["my_package"])
    override_config: FreeTable = key({},
        "Entries at the top of the model's config.json that are replaced, in training, in the engine and in exports. "
        "Dropout stays off.", example={"rms_norm_eps": 1e-5},
        acts="engine argument: `hf_overrides` of the engine, and the configuration of the trained model.")


class CheckpointingKeys(Section):
    """Keys of what a trained model recomputes and freezes."""

    model_gradient_checkpointing: bool = cosmos_key(True,
        "Whether activations are recomputed in backward to save memory.",
        acts="number: Whether the model recomputes activations.")
    freeze_moe_router: bool = key(False, "Whether the routers of a mixture of experts stay as they are.",
        acts="number: Which weights a step leaves as they are.")
