"""The files of an export that are not made of trained weights: read once, before training, from where they are.

    generation_config.json   the model's, byte for byte, but for `eos_token_id` where training stopped at other ids
    tokenizer files          the tokenizer's, byte for byte: whatever of these names lies there, whoever reads it
    chat template            that of the tokenizer; or the job's, in the place of every other
    code                     files that `auto_map` of config.json and tokenizer_config.json names, and their imports
    README.md                the base, the template, the stop ids; and what no file can carry, such as a system prompt

What is on the hub is taken from its cache, in the revision that was trained, and fetched where it is missing.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_relative_imports
from transformers.utils import cached_file

from schema.config import Config, PolicyConfig, local_path
from schema.config.chat_template import FILE as TEMPLATE
from schema.config.end_tokens import eos_token_ids
from schema.config.fetched import fetched_by
from schema.config.model_facts import FindFile, read_config
from schema.config.vocabulary import stop_tokens
from tokenization.loading import TokenizerError, policy_tokenizer, special_tokens

log = logging.getLogger(__name__)

Files = Mapping[str, bytes]
"""By name relative to an export."""
GENERATION, TOKENIZER_CONFIG, README = "generation_config.json", "tokenizer_config.json", "README.md"
OLDER_TEMPLATE, FURTHER_TEMPLATES = "chat_template.json", "additional_chat_templates"
_NAMES = (
    "tokenizer.json", TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json", "tiktoken.model",
    TEMPLATE, OLDER_TEMPLATE,
)  # fmt: skip
"""Asked for at a hub whose files cannot be listed, where the cache has none of them."""
_OF_TOKENIZER = re.compile(
    r"tokenizer[^/]*\.json|tokenizer\.model[^/]*|[^/]*vocab[^/]*\.(json|txt|bpe)|merges[^/]*\.txt|added_tokens\.json"
    r"|special_tokens_map\.json|tekken\.json|dict\.txt|emoji\.json|byte_maps\.json"
    r"|[^/]*\.(model|tiktoken|spm|tokenizer)"
)
_OF_TEMPLATE = re.compile(r"chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def source_files(config: Config, model_config: PretrainedConfig, template: str | None) -> Files:
    """All of them. model_config: that of the loaded model. template: the job's own, that training uses.

    Raises `OSError`, `ValueError`: one of them cannot be read; the text names it."""
    find = fetched_by(cached_file)
    policy = config.policy
    tokenizer = policy.tokenizer
    files = _code(policy.model_name_or_path, policy.model_revision, "config.json", find)
    files |= _code(*tokenizer, TOKENIZER_CONFIG, find)
    copied = _tokenizer(*tokenizer, find)
    if not any(_OF_TOKENIZER.fullmatch(name) for name in copied):
        log.warning("exports are without a tokenizer: %s has no files of one", tokenizer[0])
    files |= copied if template is None else _with_template(copied, template)
    own_end, special = _tokens(policy)
    ends = _stop_ids(config, own_end, special, find)
    files[GENERATION] = _generation(config, model_config, ends, find)
    strings = [text for text in config.rollout.sampling_config.stop if text not in special]
    files[README] = _readme(config, files, ends, strings, template).encode()
    return files


# ---- generation_config.json ------------------------------------------------------------------------------------


def _generation(config: Config, model_config: PretrainedConfig, ends: list[int], find: FindFile) -> bytes:
    """The model's own, or one with what its config.json says of generation."""
    policy = config.policy
    path = find(policy.model_name_or_path, policy.model_revision, GENERATION)
    if path is not None:
        original, settings = path.read_bytes(), read_config(path)
        if not ends or set(_as_list(settings.get("eos_token_id"))) == set(ends):
            return original
        log.info("%s of exports: eos_token_id is %s, as training stopped", GENERATION, ends)
    else:
        settings = _of_config(config, model_config, find)
    if ends:
        settings["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return _as_json(settings)


def _of_config(config: Config, model_config: PretrainedConfig, find: FindFile) -> dict[str, Any]:
    """Return what of a config.json would be in a generation_config.json today: an export's config.json loses it."""
    policy = config.policy
    path = find(policy.model_name_or_path, policy.model_revision, "config.json")
    written = ({} if path is None else read_config(path)) | policy.override_config
    names = GenerationConfig._get_default_generation_params().keys() - {"use_cache"}
    settings = {name: value for name, value in written.items() if name in names and value is not None}
    text = model_config.get_text_config()
    ids = {name: getattr(text, name, None) for name in _TOKEN_IDS}
    return settings | {name: value for name, value in ids.items() if value is not None}


def _stop_ids(config: Config, own_end: int | None, special: Mapping[str, int], find: FindFile) -> list[int]:
    """Token ids that ended answers in training, the model's own first. own_end, special: of the tokenizer."""
    sampling = config.rollout.sampling_config
    ids = [*sorted(eos_token_ids(config.policy, None, find)), *([] if own_end is None else [own_end])]
    ids = [] if sampling.ignore_eos else ids
    return list(dict.fromkeys([*ids, *sampling.stop_token_ids, *stop_tokens(sampling.stop, special)]))


def _tokens(policy: PolicyConfig) -> tuple[int | None, dict[str, int]]:
    """The id of the tokenizer's end token, which its class may name, and its special tokens; none where it does not
    load."""
    try:
        tokenizer = policy_tokenizer(policy)
    except TokenizerError as error:
        log.warning("exports say nothing of the tokenizer's end token: %s", error)
        return None, {}
    end = tokenizer.eos_token_id
    return None if end is None else int(end), special_tokens(tokenizer)


def _as_list(ids: Any) -> list[int]:
    return [each for each in (ids if isinstance(ids, list | tuple) else [ids]) if type(each) is int]


# ---- the tokenizer and its template ----------------------------------------------------------------------------


def _tokenizer(name: str, revision: str | None, find: FindFile) -> dict[str, bytes]:
    files = {}
    for file, place in sorted(_listed(name, revision, find).items()):
        if _OF_TOKENIZER.fullmatch(file) or _OF_TEMPLATE.fullmatch(file):
            path = place or find(name, revision, file)
            if path is not None:
                files[file] = path.read_bytes()
    return files


def _listed(name: str, revision: str | None, find: FindFile) -> dict[str, Path | None]:
    """Names of files where a model or tokenizer comes from, and their places; None: it may have to be fetched."""
    place = local_path(name)
    if place is not None:
        return _files_in(place)
    from huggingface_hub import list_repo_files

    try:
        return dict.fromkeys(list_repo_files(name, revision=revision))
    except Exception as error:  # no network, no access: what its clients raise differs between versions
        log.info("files of %s on the hub cannot be listed, those in the cache are taken: %s", name, error)
    config = find(name, revision, "config.json") or find(name, revision, TOKENIZER_CONFIG)
    here = {} if config is None else _files_in(config.parent)
    if any(_OF_TOKENIZER.fullmatch(file) for file in here):
        return here  # each further name would be asked for until time is up
    return dict.fromkeys(_NAMES) | here


def _files_in(place: Path) -> dict[str, Path | None]:
    paths = (*place.glob("*"), *place.glob(f"{FURTHER_TEMPLATES}/*"))
    return {path.relative_to(place).as_posix(): path for path in paths if path.is_file()}


def _with_template(files: Files, template: str) -> dict[str, bytes]:
    """The same tokenizer with this chat template in `chat_template.jinja`, and in the place of every other."""
    kept = {name: data for name, data in files.items() if not _OF_TEMPLATE.fullmatch(name)}
    kept[TEMPLATE] = template.encode()
    if OLDER_TEMPLATE in files:
        kept[OLDER_TEMPLATE] = _as_json({"chat_template": template})
    settings = _object(files.get(TOKENIZER_CONFIG, b""))
    if settings is not None and "chat_template" in settings:
        kept[TOKENIZER_CONFIG] = _as_json(settings | {"chat_template": template})
    return kept


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(data)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _as_json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


# ---- code ------------------------------------------------------------------------------------------------------


def _code(name: str, revision: str | None, settings: str, find: FindFile) -> dict[str, bytes]:
    """Python files that `auto_map` of one of its files names, and those that they import from their directory."""
    path = find(name, revision, settings)
    data = None if path is None else _object(path.read_bytes())
    references = _texts((data or {}).get("auto_map"))
    # With "--" it is another repository's.
    modules = [each.partition(".")[0] for each in references if "--" not in each]
    files: dict[str, bytes] = {}
    while modules:
        module = modules.pop()
        file = f"{module}.py"
        source = find(name, revision, file) if module.isidentifier() and file not in files else None
        if source is not None:
            files[file] = source.read_bytes()
            modules += get_relative_imports(source)
    return files


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


# ---- README.md -------------------------------------------------------------------------------------------------


def _readme(config: Config, files: Files, ends: Iterable[int], strings: Iterable[str], template: str | None) -> str:
    """ends, strings: ids and texts that ended answers. template: the job's own."""
    policy = config.policy
    name, revision = policy.model_name_or_path, policy.model_revision
    head = ["library_name: transformers"] + ([f"base_model: {name}"] if local_path(name) is None else [])
    method = "reinforcement learning" if config.is_grpo else "supervised fine-tuning"
    facts = [f"Base model: `{_public(name)}`" + (f", revision `{revision}`" if revision else "")]
    if policy.tokenizer_name_or_path:
        facts.append(f"Tokenizer: that of `{_public(policy.tokenizer_name_or_path)}`")
    facts += _prompts(config, files, template)
    facts.append(f"Token ids that end an answer: {', '.join(map(str, ends)) or 'none'} (`{GENERATION}`)")
    if stops := ", ".join(f"`{json.dumps(text, ensure_ascii=False)}`" for text in strings):
        facts.append(f"Strings that end an answer, which no file here carries: {stops}")
    lines = ["---", *head, "---", "", f"# {config.logging.experiment_name or config.logging.project_name}", ""]
    lines += [f"Trained with cosmos-launch by {method}.", "", *(f"- {fact}" for fact in facts)]
    system = config.train.train_policy.system_prompt
    if system:
        log.warning(
            "training prompts with train.train_policy.system_prompt, which no file for transformers carries: whoever "
            "serves an export has to send it (its %s says so)",
            README,
        )
        quoted = "\n".join(f"    {line}" for line in system.splitlines())
        lines += ["", "Training put this system prompt before each prompt that had none; send it, too:", "", quoted]
    return "\n".join(lines) + "\n"


def _public(name: str) -> str:
    """The name of a model without the directories of this machine above it: an export may be uploaded."""
    place = local_path(name)
    return name if place is None else place.resolve().name


def _prompts(config: Config, files: Files, template: str | None) -> Iterator[str]:
    turns = config.rollout.multi_turn_config
    listed = (_object(files.get(TOKENIZER_CONFIG, b"")) or {}).get("chat_template")
    templates = [data.decode(errors="replace") for name, data in files.items() if _OF_TEMPLATE.fullmatch(name)]
    templates += [*_texts(listed)]
    if template is not None:
        yield f"Chat template: the job's own, in `{TEMPLATE}`"
    elif templates:
        yield "Chat template: that of the tokenizer"
    else:
        yield "Chat template: none; prompts are plain text"
    if config.is_grpo and any("enable_thinking" in template for template in templates):
        thinks = "true" if turns.enable_thinking else "false"
        log.info("training renders prompts with enable_thinking = %s: whoever serves an export should, too", thinks)
        yield f"Prompts were rendered with `enable_thinking = {thinks}`; the template's default may be another"
