"""Rules of what a trainer can load: kinds of models, and tokenizers whose ids the model has.

config.json      its model_type against the kinds that `AutoModelForCausalLM` loads, read in the source of the
                 installed transformers, which is not imported: that would take torch and seconds
tokenizer files  the largest id against the model's vocabulary

Whether generation_config.json is JSON is checked here, too: exports carry it, and its end tokens stop answers.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from schema.config.chat_template import TemplateError, read_template
from schema.config.model_facts import BrokenModelError, FindFile, ModelFacts, local_file, read_config
from schema.config.paths import NotAFileError, read_regular
from schema.config.problem import Problem
from schema.config.root import Config
from schema.config.rules.named import named_models, policy_facts
from schema.config.vocabulary import Vocabulary, numbered

_MODEL = "policy.model_name_or_path"
_MAX_BYTES = 16 * 1024 * 1024
_TEXT_OF_SEVERAL = frozenset(
    {
        "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "phi4_multimodal", "qwen3_5", "qwen3_5_moe",
        "qwen4_exp",
    }
)  # fmt: skip
"""Models with parts for images or sound that `AutoModelForCausalLM` loads, and whose text part trains here
(transformers 5.19)."""
_NOT_APART = "whose layers and output head this trainer cannot take apart"
_NOT_TEXT = "which answers to images or sound, or is a part of another model"
_UNFIT = {
    **dict.fromkeys(("emu3", "llama4", "llama4_text", "mllama"), _NOT_APART),
    **dict.fromkeys(
        (
            "gemma4_assistant", "gemma4_unified_assistant", "git", "got_ocr2", "moshi", "musicgen", "musicgen_melody",
            "trocr", "whisper",
        ),
        _NOT_TEXT,
    ),
}  # fmt: skip
"""Kinds that `AutoModelForCausalLM` lists, and that cannot be trained on text here."""


def models_are_of_text(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Each model that the trainer loads is of a kind that `AutoModelForCausalLM` loads and that trains on text."""
    policy = config.policy
    for key, (facts, _) in named_models(config, find).items():
        if facts is None:
            continue
        of_critic = key == "critic.model_name_or_path"
        keys, section = (config.critic, "critic") if of_critic else (policy, "policy")
        own = ("AutoModel" if of_critic else "AutoModelForCausalLM") in facts.own_code
        trusts = keys.trust_remote_code or (policy.trust_remote_code and facts.name == policy.model_name_or_path)
        if own and trusts:
            continue
        if reason := _unfit(facts, registers=bool(policy.external_modules or keys.external_modules)):
            hint = "name a text model"
            if facts.senses:
                hint += ", such as the one that it was made of: models that read images or sound are not built yet"
            elif own:
                hint = f"if you trust the code that comes with it, write {section}.trust_remote_code = true"
            elif reason.startswith(_UNKNOWN):
                hint += f", or the module that registers this kind in {section}.external_modules"
            message = f'{facts.name} is a model of model_type = "{facts.model_type}", {reason}'
            if not facts.model_type:
                message = f"config.json of {facts.name} names no model_type, by which {reason}"
                hint = 'write the "model_type" of its family into it, in a copy of the model where it is not yours'
            yield Problem(key, message, facts.name, hint)


def classes_are_those_of_the_kind(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Warning: config.json names a class, which other programs go by, and its model_type leads to another."""
    facts, _ = policy_facts(config, find)
    if facts is None or not facts.architectures or facts.own_code or facts.senses:
        return
    kinds, version = _kinds()
    classes = kinds.get(facts.model_type)
    if classes is None or set(classes) & set(facts.architectures):
        return
    message = (
        f"config.json of {facts.name} names the class {', '.join(facts.architectures)}; training loads "
        f'{classes[0]}, by model_type = "{facts.model_type}" (transformers{version}), and leaves out tensors that it '
        "has no place for"
    )
    hint = "vLLM goes by `architectures`: correct it, in a copy of the model where it is not yours"
    yield Problem(_MODEL, message, facts.name, hint)


def generation_settings_are_read(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """The generation_config.json that exports carry, and whose end tokens stop answers, is a JSON object."""
    policy = config.policy
    path = find(policy.model_name_or_path, policy.model_revision, "generation_config.json")
    try:
        if path is not None:
            read_config(path)
    except BrokenModelError as error:
        hint = "copy the file again from where the model was published; without it, config.json counts"
        yield Problem(_MODEL, str(error), policy.model_name_or_path, hint)


_UNKNOWN = "which AutoModelForCausalLM"


def _unfit(facts: ModelFacts, *, registers: bool) -> str:
    """Why a model cannot be trained on text; "" where it can. registers: whether modules of the job add kinds."""
    kind = facts.model_type
    if not kind:
        return "transformers chooses a class"
    if kind in _UNFIT:
        return _UNFIT[kind]
    if facts.has_encoder:
        return "whose decoder reads an encoder: models that only go on with a text are trained here"
    kinds, version = _kinds()
    if not kinds:  # of transformers nothing is known here
        several = facts.senses and kind not in _TEXT_OF_SEVERAL
        return f"{_UNKNOWN} of transformers does not load as a text model" if several else ""
    if kind in kinds or registers:
        return ""
    return f"{_UNKNOWN} of the installed transformers{version} does not load"


@cache
def _kinds() -> tuple[dict[str, tuple[str, ...]], str]:
    """The kinds that `AutoModelForCausalLM` of the installed transformers loads, with their classes, and its version;
    none without it."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}, ""
    root = Path(spec.origin).parent
    try:
        tree = ast.parse(read_regular(root / "models" / "auto" / "modeling_auto.py", _MAX_BYTES))
        lines = read_regular(root / "__init__.py", _MAX_BYTES).decode().splitlines()
    except (OSError, NotAFileError, SyntaxError, ValueError):
        return {}, ""
    version = next((line.split('"')[1] for line in lines if line.startswith('__version__ = "')), "")
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]:
                pairs = ast.literal_eval(node.value.args[0])
                classes = {kind: (made,) if isinstance(made, str) else tuple(made) for kind, made in pairs}
                return classes, f" {version}" if version else ""
    return {}, ""


# ---- the tokenizer ---------------------------------------------------------------------------------------------


def tokens_have_rows(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Each token that a text or the chat template can become has a row in the model's embeddings."""
    beyond = _beyond(config, find)
    if beyond is not None and beyond.used:
        yield beyond.problem(
            "choose the tokenizer that the model was made with, or extend the model's embeddings "
            "(`resize_token_embeddings`) and save it"
        )


def unused_tokens_without_rows(config: Config, find: FindFile = local_file) -> Iterator[Problem]:
    """Warning: special tokens that the model has no row for, and that only a text which spells them out becomes."""
    beyond = _beyond(config, find)
    if beyond is not None and not beyond.used:
        yield beyond.problem("nothing to do as long as no text of the data spells them out: rows that do are refused")


@dataclass(frozen=True)
class _Beyond:
    """Tokens whose ids the model's embeddings have no row for. key, name: the tokenizer. tokens: by their ids.

    used: some are no special tokens, end a text, or stand in the chat template.
    """

    key: str
    name: str
    model: str
    rows: int
    tokens: dict[int, str]
    used: bool

    def problem(self, hint: str) -> Problem:
        last = max(self.tokens)
        few = ", ".join(f"{number} ({self.tokens[number]!r})" for number in sorted(self.tokens)[:3])
        message = (
            f"the tokenizer of {self.name} has ids up to {last}, and {_MODEL} = {self.model} has {self.rows} rows of "
            f"embeddings (vocab_size): none for {few}{', …' * (len(self.tokens) > 3)}"
        )
        return Problem(self.key, message, self.name, hint, related=(_MODEL,))


def _beyond(config: Config, find: FindFile) -> _Beyond | None:
    facts, _ = policy_facts(config, find)
    name, revision = config.policy.tokenizer
    if facts is None or facts.vocabulary is None or (vocabulary := numbered(name, revision, find)) is None:
        return None
    rows = facts.vocabulary
    tokens = {number: token for token, number in vocabulary.ids.items() if number >= rows}
    if not tokens:
        return None
    template = _template(config, find)
    used = any(_is_used(token, vocabulary, template) for token in tokens.values())
    return _Beyond(config.policy.tokenizer_key, name, facts.name, rows, tokens, used)


def _is_used(token: str, vocabulary: Vocabulary, template: str) -> bool:
    return token not in vocabulary.special or token == vocabulary.end or token in template


def _template(config: Config, find: FindFile) -> str:
    """The chat template of the job, or the texts of those that come with the tokenizer."""
    name, revision = config.policy.tokenizer
    try:
        own = read_template(config)
    except TemplateError:
        own = ""  # another rule reports it
    if own is not None:
        return own
    settings = _text_of(find(name, revision, "tokenizer_config.json"))
    try:
        listed = str(json.loads(settings or "{}").get("chat_template", ""))
    except (ValueError, RecursionError, AttributeError):
        listed = ""
    return listed + _text_of(find(name, revision, "chat_template.jinja"))


def _text_of(path: Path | None) -> str:
    try:
        return "" if path is None else read_regular(path, _MAX_BYTES).decode(errors="replace")
    except (OSError, NotAFileError):
        return ""


LOADABLE_RULES = (models_are_of_text, generation_settings_are_read, tokens_have_rows)
"""All of them read files of models."""
LOADABLE_WARNINGS = (unused_tokens_without_rows, classes_are_those_of_the_kind)
