"""Keys of every model that is loaded: where its tokenizer is, whose code may run, what is overridden."""

from __future__ import annotations

from pydantic import Field

from schema.config.base import FreeTable, Section


class ModelKeys(Section):
    """How a model and its tokenizer are loaded."""

    model_revision: str | None = Field(default=None, description="Revision of a model on the hub.")
    tokenizer_name_or_path: str | None = Field(
        default=None,
        min_length=1,
        description="Tokenizer: a local directory or a name on the hub. Unset: the model's own.",
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Whether Python code that comes with the model or its tokenizer may run on these machines.",
    )
    external_modules: list[str] = Field(
        default=[],
        description="Python modules imported before the model is loaded, to register model classes.",
    )
    override_config: FreeTable = Field(
        default={}, description="Entries of the model's config.json that are replaced, such as dropout."
    )


class CheckpointingKeys(Section):
    """What a trained model recomputes and freezes."""

    model_gradient_checkpointing: bool = Field(
        default=True, description="Whether activations are recomputed in backward to save memory."
    )
    freeze_moe_router: bool = Field(
        default=False, description="Whether the routers of a mixture of experts stay as they are."
    )
