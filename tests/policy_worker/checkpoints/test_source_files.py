"""What exports copy: generation settings, tokenizers and their templates, code, and what README.md says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import hub

from policy_worker.checkpoints.export import prepare_export
from policy_worker.checkpoints.source_files import source_files
from policy_worker.errors import SettingsError
from policy_worker.model.load import load_model
from schema.config.chat_template import read_template
from tests.policy_worker.material import make_config, tiny_lm
from tests.schema.config.rules.test_loadable import GENERIC, tokenizer_json
from tests.schema.remedies import config_of

EOS = GENERIC | {"eos_token": "w2"}
OWN = "{% for m in messages %}[own {{ m.content }}]{% endfor %}"


def model_at(path: Path, **files: Any) -> Path:
    """A model whose config.json says 2 ends a text; with these files, of JSON or text: `a__json`, None for none."""
    tiny_lm().save_pretrained(path)
    (path / "generation_config.json").unlink()
    for name, data in ({"tokenizer__json": tokenizer_json(), "tokenizer_config__json": EOS} | files).items():
        file = path / name.replace("___", "/").replace("__", ".")
        file.parent.mkdir(exist_ok=True)
        if data is not None:
            file.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def copied(model: Path, **values: Any) -> dict[str, bytes]:
    """What exports of this model copy, with these values of the configuration."""
    config = make_config(policy={"model_name_or_path": str(model)})
    config = config_of(config.to_dict(), {key.replace("__", "."): value for key, value in values.items()})
    return dict(source_files(config, tiny_lm().config, read_template(config)))


# ---- generation_config.json ------------------------------------------------------------------------------------

PUBLISHED: list[dict[str, Any]] = [
    {"do_sample": False, "temperature": 0.6, "top_p": 0.95},
    {"eos_token_id": 2, "temperature": 0.7, "top_k": 20},
    {"eos_token_id": [2], "max_new_tokens": None, "top_k": 0, "chat_format": "chatml"},
    {"pad_token_id": -1},
    {"num_beams": 1, "length_penalty": 0.9, "early_stopping": True},
    {"output_scores": True},
    {"use_cache": False, "cache_implementation": "hybrid"},
    {"cache_implementation": "of another version"},
    {"num_return_sequences": 3},
    {"max_new_tokens": 0},
    {"transformers_version": "4.37.2", "_from_model_config": True},
    {"typical_p": 0.9, "min_p": 0.1, "epsilon_cutoff": 0.1, "own": {"x": [1]}},
]
"""Forms of generation_config.json; transformers refuses to save most, and to load some."""


@pytest.mark.parametrize("settings", PUBLISHED, ids=str)
def test_a_generation_config_is_copied(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Byte for byte where it says what ended answers in training; else that is put into it."""
    written = json.dumps(settings, indent=4)
    model = model_at(tmp_path / "m", generation_config__json=written)
    config = make_config(policy={"model_name_or_path": str(model)})
    data = prepare_export(load_model(config), config, None)["generation_config.json"].decode()
    assert json.loads(data) == {"eos_token_id": 2} | settings
    assert (data == written) == ("eos_token_id" in settings)


STOPS: list[tuple[dict[str, Any] | None, str, dict[str, Any], Any]] = [
    ({"eos_token_id": [2, 7]}, "w2", {}, [2, 7]),
    ({"eos_token_id": 5, "temperature": 0.6}, "w2", {}, [5, 2]),
    ({"temperature": 0.6}, "w3", {}, [2, 3]),
    ({"eos_token_id": 2}, "w2", {"stop_token_ids": [8]}, [2, 8]),
    ({"eos_token_id": 2}, "w2", {"stop_token_ids": [8], "ignore_eos": True}, 8),
    ({"eos_token_id": 2}, "w2", {"ignore_eos": True}, 2),
    ({"eos_token_id": -1}, "w3", {}, [2, 3]),
    ({"eos_token_id": 2}, "w2", {"stop": ["w3", "<a>"]}, [2, 10]),
    (None, "w2", {}, 2),
    (None, "w4", {}, [2, 4]),
]
"""generation_config.json, the tokenizer's end token, the sampling, and what `eos_token_id` is in an export."""


@pytest.mark.parametrize(("settings", "end", "sampling", "wanted"), STOPS)
def test_ids_that_ended_answers_are_in_the_generation_config(
    tmp_path: Path, settings: dict[str, Any] | None, end: str, sampling: dict[str, Any], wanted: Any
) -> None:
    tokenizer = GENERIC | {"eos_token": end}
    files = {"tokenizer__json": tokenizer_json("<a>"), "tokenizer_config__json": tokenizer}
    model = model_at(tmp_path / "m", generation_config__json=settings, **files)
    values = {f"rollout__sampling_config__{key}": value for key, value in sampling.items()}
    found = json.loads(copied(model, **values)["generation_config.json"])
    assert found["eos_token_id"] == wanted
    if settings is not None:
        assert found | {"eos_token_id": 0} == settings | {"eos_token_id": 0}, "nothing else has changed"


def test_settings_of_an_older_config_json_go_on(tmp_path: Path) -> None:
    """transformers reads them there where there is no generation_config.json, and writes none into a config.json."""
    model = model_at(tmp_path / "m")
    config = json.loads((model / "config.json").read_text()) | {"do_sample": True, "temperature": 0.25}
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_bytes(copied(model)["generation_config.json"])
    loaded = GenerationConfig.from_pretrained(model)
    assert (loaded.do_sample, loaded.temperature, loaded.eos_token_id, loaded.bos_token_id) == (True, 0.25, 2, 1)


# ---- tokenizers ------------------------------------------------------------------------------------------------

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "own.tiktoken", "tekken.json",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates/tool_use.jinja", "tokenization_own.py",
    "tokenization_parts.py",
)  # fmt: skip


def test_tokenizer_files_are_copied_byte_for_byte(tmp_path: Path) -> None:
    model, own = model_at(tmp_path / "m"), tmp_path / "t"
    for name in (*TOKENIZER_FILES, "README.md", "model.safetensors", "preprocessor.py", "notes.txt"):
        (own / name).parent.mkdir(exist_ok=True, parents=True)
        (own / name).write_bytes(f" {name}\r\n\xff".encode("latin-1"))
    outside = {"AutoModel": "../outside.X", "AutoConfig": "other/repository--configuration.X"}
    (tmp_path / "outside.py").touch()
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]} | outside, "x": "é"}
    (own / "tokenizer_config.json").write_text(json.dumps(settings, indent=7))
    (own / "tokenization_own.py").write_text("from .tokenization_parts import part\n")
    (own / "tokenization_parts.py").write_text("part = 1\n")
    files = copied(model, policy__tokenizer_name_or_path=str(own))
    assert files.keys() == {*TOKENIZER_FILES, "generation_config.json", "README.md"}
    for name in TOKENIZER_FILES:
        assert files[name] == (own / name).read_bytes()


def test_files_of_a_hub_are_those_of_the_revision_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constants in (huggingface_hub.constants, hub.constants):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--owner--name"
    (model / "refs").mkdir(parents=True)
    for revision, generation in (("main", {"eos_token_id": 5}), ("v2", {"eos_token_id": 2})):
        (model / "refs" / revision).write_text(f"hash-of-{revision}")
        files = {"own__tiktoken": revision, "additional_chat_templates___a__jinja": "a"}
        model_at(model / "snapshots" / f"hash-of-{revision}", generation_config__json=generation, **files)
    config = make_config(policy={"model_name_or_path": "owner/name", "model_revision": "v2"})
    files = source_files(config, tiny_lm().config, read_template(config))
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": 2}
    assert files["own.tiktoken"] == b"v2"
    assert {"tokenizer.json", "additional_chat_templates/a.jinja"} < files.keys()
    assert b"base_model: owner/name" in files["README.md"]
    assert b"revision `v2`" in files["README.md"]


def test_a_model_without_a_tokenizer_is_exported_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_at(tmp_path / "m", tokenizer__json=None, tokenizer_config__json=None)
    assert copied(model).keys() == {"generation_config.json", "README.md"}
    assert "without a tokenizer" in caplog.text


NAMED = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old tools"}]
PLACES: dict[str, dict[str, Any]] = {
    "nowhere": {},
    "in the settings": {"tokenizer_config__json": EOS | {"chat_template": "old"}},
    "several in the settings": {"tokenizer_config__json": EOS | {"chat_template": NAMED}},
    "in a file": {"chat_template__jinja": "old"},
    "in a file and the settings": {
        "chat_template__jinja": "old", "tokenizer_config__json": EOS | {"chat_template": "older"},
    },
    "in the processor's file": {"chat_template__json": {"chat_template": "old"}},
    "in further files": {
        "chat_template__jinja": "old", "additional_chat_templates___tool_use__jinja": "old tools",
    },
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("own", [True, False])
def test_exports_prompt_as_training_did(tmp_path: Path, place: str, own: bool) -> None:
    model, export = model_at(tmp_path / "m", **PLACES[place]), tmp_path / "export"
    (tmp_path / "own.jinja").write_text(OWN)
    trained = AutoTokenizer.from_pretrained(model)
    values = {"rollout__multi_turn_config__custom_chat_template_path": str(tmp_path / "own.jinja")} if own else {}
    if own:
        trained.chat_template = OWN
    files = copied(model, **values)
    for name, data in files.items():
        (export / name).parent.mkdir(exist_ok=True, parents=True)
        (export / name).write_bytes(data)
    loaded = AutoTokenizer.from_pretrained(export)
    assert loaded.chat_template == trained.chat_template
    if trained.chat_template is not None:
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            talk = [{"role": "user", "content": "w1 w2"}]
            texts = [each.apply_chat_template(talk, tools=tools, tokenize=False) for each in (loaded, trained)]
            assert texts[0] == texts[1]
    settings = (model / "tokenizer_config.json").read_bytes()
    if own:  # and readers that know one of the places alone
        if "chat_template" in json.loads(settings):
            assert json.loads(files["tokenizer_config.json"]) == EOS | {"chat_template": OWN}
        else:
            assert files["tokenizer_config.json"] == settings
        assert files["chat_template.jinja"].decode() == OWN
        assert json.loads(files.get("chat_template.json", json.dumps({"chat_template": OWN})))["chat_template"] == OWN
        assert not any(name.startswith("additional") for name in files)
    else:
        assert files["tokenizer_config.json"] == settings


# ---- what is said ----------------------------------------------------------------------------------------------


def test_the_readme_says_what_no_file_carries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = model_at(tmp_path / "m", chat_template__jinja="{{ enable_thinking }}")
    plain = copied(model)["README.md"].decode()
    assert f"Base model: `{model.name}`" in plain
    assert "enable_thinking = false" in plain
    assert "system prompt" not in plain
    values = {
        "train__train_policy__system_prompt": "Think.\nAnswer.",
        "rollout__multi_turn_config__enable_thinking": True,
        "rollout__sampling_config__stop": ["</answer>"],
    }
    said = copied(model, **values)["README.md"].decode()
    for words in ("    Think.\n    Answer.", "enable_thinking = true", '"</answer>"', "an answer: 2 "):
        assert words in said
    assert "train.train_policy.system_prompt" in caplog.text


def test_what_cannot_be_exported_is_found_before_training(tmp_path: Path) -> None:
    model = model_at(tmp_path / "m")
    trained = load_model(make_config(policy={"model_name_or_path": str(model)}))
    trained.dropout = {"a_key": object()}  # type: ignore[dict-item]  (cannot be written as JSON)
    with pytest.raises(SettingsError, match="could not be exported"):
        prepare_export(trained, make_config(policy={"model_name_or_path": str(model)}), None)
    (model / "generation_config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"generation_config\.json"):
        prepare_export(trained, make_config(policy={"model_name_or_path": str(model)}), None)
