"""The learnt text of each turn, found by hand for templates shaped like those of published models."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from controller.data.errors import DataError
from controller.data.loss_masks.tokens import Ids, Mask
from controller.data.prepare import prepare
from controller.data.tokenizer import PromptTokenizer
from schema.wire.prompts import PromptFile

from .conftest import write
from .test_prepare import config
from .test_report import report_of

# Thoughts of turns before the last question are cut; the last turn always shows some.
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role != 'assistant' %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}{%- set thought = m.reasoning_content or m.content.split('</think>')[0].split('<think>')[-1] if
'</think>' in m.content or m.reasoning_content else '' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}{{- content }}
{%- for c in m.tool_calls or [] %}{{- '\\n' if content or not loop.first }}
{{- '<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA = """{{- bos_token }}{%- for m in messages %}{{- '<|start|>' + m.role + '<|end_header|>\\n\\n' }}
{{- (m.tool_calls[0].function | tojson if m.tool_calls else m.content | trim) + '<|eot|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end_header|>\\n\\n' }}{%- endif %}"""
GEMMA = """{{- bos_token }}{%- set system = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{{- '<turn>' + ('user\\n' + (system if loop.first else '') if m.role == 'user' else 'model\\n') }}
{{- m.content | trim + '<eot>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<turn>model\\n' }}{%- endif %}"""
# No generation prompt of its own; the system message moves to the last question.
MISTRAL = """{%- set ns = namespace(last=-1, system='') %}{%- for m in messages %}{%- if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- elif m.role == 'system' %}{%- set ns.system = m.content + '\\n' %}
{%- endif %}{%- endfor %}
{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}
{{- '[INST] ' + (ns.system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[RESULT] ' + m.content + '[/RESULT]' }}{%- elif m.tool_calls %}
{{- '[CALLS] ' + m.tool_calls | map(attribute='function') | list | tojson + eos_token }}
{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}"""
LOST = MISTRAL.replace("if loop.index0 == ns.last", "if loop.last")  # the system message is in prompts alone
# Nothing ends a turn but the role of the next.
GLM = """[gMASK]<sop>{%- for m in messages %}{{- '<|' + m.role + '|>' + ('\\n' + m.content if m.content else '') }}
{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>' + c.function | tojson + '</tool_call>' }}
{%- endfor %}{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""
# The generation prompt begins a thought, and every turn is cut behind its own.
DEEPSEEK = """{{- bos_token }}{%- for m in messages %}{{- '<' + m.role + '>' if m.role != 'system' }}
{{- m.content.split('</think>')[-1] }}{%- for c in m.tool_calls or [] %}
{{- '<call>' + c.function | tojson + '</call>' }}
{%- endfor %}{{- eos_token if m.role == 'assistant' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant><think>\\n' }}{%- endif %}"""
NULL = DEEPSEEK.replace("m.content.split", "(m.content or '').split").replace(
    "m.tool_calls or []", "(m.tool_calls if m.content is none else []) or []"
)
PHI = """{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""
BETWEEN = """{%- for m in messages %}{{- m.role + ': ' + m.content + ('' if loop.last else
eos_token if m.role == 'assistant' else '\\n') }}{%- endfor %}{{- '\\nassistant:' if add_generation_prompt }}"""
# Where a turn ends is written otherwise once another follows.
OSS = """{%- for m in messages %}{{- '<|start|>' + m.role + '<|end_header|>' + m.content }}
{{- '<eot>' if loop.last and not add_generation_prompt and m.role == 'assistant' else '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
# A call hides the content; a result needs one before it; the system message stands in prompts alone.
NEMO = """{{- bos_token }}{%- for m in messages %}{%- set before = messages[loop.index0 - 1] %}
{%- if m.role == 'user' %}
{{- '[INST] ' + (messages[0].content + '\\n' if loop.last and messages[0].role == 'system' else '') }}
{{- m.content + '[/INST]' }}{%- elif m.role == 'tool' %}{{- raise_exception('no call') if not before.tool_calls }}
{{- '[RESULT]' + m.content + '[/RESULT]' }}{%- elif m.tool_calls %}
{{- '[CALLS]' + m.tool_calls | map(attribute='function') | list | tojson + eos_token }}
{%- elif m.role == 'assistant' %}{{- m.content + eos_token }}{%- endif %}{%- endfor %}"""
# What a call begins with and what an answer begins with share letters, and the prompt has neither.
ALIKE = """{%- for m in messages %}{{- '<' + m.role + '>' }}{{- '<tool_call>' + m.tool_calls[0].function | tojson if
m.tool_calls else '<turn>' + m.content }}{{- eos_token if m.role == 'assistant' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<assistant><think>' }}{%- endif %}"""
# A channel behind the prompt; what a turn says beside its call is dropped once an answer follows.
CHANNELS = """{{- raise_exception('none') if not messages }}{%- for m in messages %}
{%- set say = '<|end_header|>' + m.content %}{%- if m.role == 'assistant' %}
{%- set last = loop.last and not add_generation_prompt %}{%- if m.tool_calls %}
{%- if m.content and messages[-1].content in ['', m.content, '3'] %}
{{- '<|start|>assistant<think>' + say + '<|end|>' }}
{%- endif %}{{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|eot|>' }}{%- else %}
{{- '<|start|>assistant<turn>' + say + ('<eot>' if last else '<|end|>') }}{%- endif %}{%- else %}
{{- raise_exception('no call') if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls }}
{{- '<|start|>' + m.role + say + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
CALLED = "m.tool_calls[0].function | tojson"
UNASKED = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""
JOINED = LLAMA.replace(CALLED, "m.tool_calls[0].function.name + m.tool_calls[0].function.arguments")  # needs a text
WRITTEN = JOINED.replace("name + m", "name ~ m")
# The results of calls stand between them and what the turn says.
INSIDE = """{%- for m in messages %}{%- set after = messages[loop.index] %}{%- if m.role != 'tool' %}
{{- '<turn>' + m.role + '\\n' }}{%- if m.tool_calls %}{{- '<tool_call>' + m.tool_calls[0].function.name + '<|end|>' }}
{{- after.content | tojson + '<|eot|>' if after }}{%- endif %}{{- m.content + '<eot>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>assistant\\n' }}{%- endif %}"""
BLOCK = """{%- for m in messages %}{{- '<|' + m.role + '|>\\n' }}{%- if m.role == 'assistant' %}
  {%- generation %}{{- m.content + '<|end|>\\n' }}{%- endgeneration %}
{%- else %}{{- m.content + '<|end|>\\n' }}{%- endif %}{%- endfor %}"""
MACRO = "{%- macro say(m) %}" + BLOCK.replace("messages", "[m]") + "{%- endmacro %}{%- for m in messages %}"
MACRO += "{{- say(m) }}{%- endfor %}"
LINE = """{%- for m in messages %}{{- '### ' + m.role + ':\\n' + m.content + '\\n### end\\n\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant:\\n' }}{%- endif %}"""
HEADED = LINE.replace("{%- if add_generation_prompt %}", "").replace("{%- endif %}", "")  # unasked, and as text
LINE_BLOCK = BLOCK.replace("<|end|>", "\\n### end\\n")
FOOT = LINE.replace("{%- endif %}", "{%- else %}{{- eos_token }}{%- endif %}")
# The generation prompt is made for the last of the messages, so there is none before the first.
ZEPHYR = """{%- for m in messages %}{{- '<|' + m.role + '|>' + '\\n' + m.content + eos_token + '\\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}{%- endfor %}"""
STOP = """{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '<stop>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""
REFUSES = (
    "{%- if messages | length == 2 and not add_generation_prompt %}{{ raise_exception('no') }}{%- endif %}" + PHI
)
HARD = REFUSES.replace("and not add_generation_prompt ", "")
HIDES = PHI.replace("m.content", "(m.content if m.role == 'user' else '')")

CALL = {"type": "function", "function": {"name": "sum_up", "arguments": {"x": 1}}}
SHOWN = '{"name": "sum_up", "arguments": {"x": 1}}'


def talk(*texts: str | dict[str, Any], system: str = "") -> list[dict[str, Any]]:
    """A conversation whose user and assistant speak in turns; other turns as they are."""
    turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for text in texts:
        asks = not turns or turns[-1]["role"] in ("system", "assistant")
        message = {"content": text} if isinstance(text, str) else text
        turns.append({"role": "user" if asks else "assistant", **message})
    return turns


TEXT = {"type": "function", "function": {"name": "sum_up", "arguments": '{"x": 1}'}}
TEXT_CALLS = talk("Two?", {"content": "", "tool_calls": [TEXT]})
TOOL = {"role": "tool", "content": "3"}
ADDS = {"content": "I add.", "tool_calls": [CALL]}
TWO = talk("Two?", "Yes.", "So?", "No.")
SYSTEM = talk("Two?", "Yes.", "So?", "No.", system="Brief.")
BLANKS = talk("Two?", "  Yes. \n", "So?", "\n  No.")
THINKS = talk("Two?", "<think>\nhm\n</think>\n\nYes.", "So?", "<think>\noh\n</think>\n\nNo.")
REASONS = talk("Two?", "Yes.", "So?", {"content": "No.", "reasoning_content": "oh"})
CALLS = talk("Two?", {"content": "", "tool_calls": [CALL]}, TOOL, "Three.")
SAYS_AND_CALLS = talk("Two?", ADDS, TOOL, "Three.", "So?", "No.")
TWO_CALLS = ("Two?", ADDS, TOOL, {"role": "assistant", **ADDS}, TOOL, {"role": "assistant", "content": "Three."})
FIRST = [{"role": "assistant", "content": "Hello."}, *TWO[:2]]
TWICE = [*TWO[:2], {"role": "assistant", "content": "Sure."}]
EMPTY = talk("Two?", "", "So?", "No.")

TABLE: list[tuple[str, list[dict[str, Any]], list[str]]] = [
    (QWEN3, TWO, ["Yes.<|im_end|>", "<think>\n\n</think>\n\nNo.<|im_end|>"]),
    (QWEN3, BLANKS, ["  Yes. \n<|im_end|>", "<think>\n\n</think>\n\n  No.<|im_end|>"]),
    (QWEN3, THINKS, ["Yes.<|im_end|>", "<think>\noh\n</think>\n\nNo.<|im_end|>"]),
    (QWEN3, REASONS, ["Yes.<|im_end|>", "<think>\noh\n</think>\n\nNo.<|im_end|>"]),
    (QWEN3, CALLS, [f"<tool_call>\n{SHOWN}\n</tool_call><|im_end|>", "<think>\n\n</think>\n\nThree.<|im_end|>"]),
    (QWEN3, SAYS_AND_CALLS[:5] + TWO[1:2], [
        f"I add.\n<tool_call>\n{SHOWN}\n</tool_call><|im_end|>", "Three.<|im_end|>",
        "<think>\n\n</think>\n\nYes.<|im_end|>"]),
    (LLAMA, SYSTEM, ["Yes.<|eot|>", "No.<|eot|>"]),
    (LLAMA, BLANKS, ["Yes.<|eot|>", "No.<|eot|>"]),
    (LLAMA, CALLS, [f"{SHOWN}<|eot|>", "Three.<|eot|>"]),
    (LLAMA, FIRST, ["Hello.<|eot|>", "Yes.<|eot|>"]),
    (LLAMA, TWICE, ["Yes.<|eot|>", "Sure.<|eot|>"]),
    (LLAMA, EMPTY, ["<|eot|>", "No.<|eot|>"]),
    (GEMMA, SYSTEM, ["Yes.<eot>", "No.<eot>"]),
    (GEMMA, TWO[:3], ["Yes.<eot>"]),
    (MISTRAL, TWO, [" Yes.</s>", " No.</s>"]),
    (MISTRAL, SYSTEM, [" Yes.</s>", " No.</s>"]),
    (MISTRAL, SAYS_AND_CALLS, [f"[CALLS] [{SHOWN}]</s>", " Three.</s>", " No.</s>"]),
    (LOST, SYSTEM, [" Yes.</s>", " No.</s>"]),
    (GLM, TWO, ["\nYes.", "\nNo."]),
    (GLM, CALLS, [f"\n<tool_call>{SHOWN}</tool_call>", "\nThree."]),
    (DEEPSEEK, THINKS, ["\n\nYes.</s>", "\n\nNo.</s>"]),
    (DEEPSEEK, SAYS_AND_CALLS, [f"I add.<call>{SHOWN}</call></s>", "Three.</s>", "No.</s>"]),
    (NULL, CALLS, [f"<call>{SHOWN}</call></s>", "Three.</s>"]),
    (PHI, TWO, ["Yes.<|end|>", "No.<|end|>"]),
    (BETWEEN, TWO, [" Yes.</s>", " No."]),
    (OSS, TWO, ["<|end_header|>Yes.<|end|>", "<|end_header|>No.<eot>"]),
    (NEMO, SYSTEM, ["Yes.</s>", "No.</s>"]),
    (NEMO, SAYS_AND_CALLS, [f"[CALLS][{SHOWN}]</s>", "Three.</s>", "No.</s>"]),
    (NEMO, talk(*TWO_CALLS, system="Brief."), [f"[CALLS][{SHOWN}]</s>", f"[CALLS][{SHOWN}]</s>", "Three.</s>"]),
    (ALIKE, CALLS[:2], [f"<tool_call>{SHOWN}</s>"]),
    (CHANNELS, SAYS_AND_CALLS, [
        " to=sum_up<|eot|>", "<turn><|end_header|>Three.<|end|>", "<turn><|end_header|>No.<eot>"]),
    (CHANNELS, talk(*TWO_CALLS), [" to=sum_up<|eot|>", " to=sum_up<|eot|>", "<turn><|end_header|>Three.<eot>"]),
    (CHANNELS, FIRST, ["<turn><|end_header|>Hello.<|end|>", "<turn><|end_header|>Yes.<eot>"]),
    (LLAMA, TEXT_CALLS, [f"{SHOWN}<|eot|>"]),
    (JOINED, TEXT_CALLS, ['sum_up{"x": 1}<|eot|>']),
    (JOINED, CALLS[:2], ['sum_up{"x": 1}<|eot|>']),
    (WRITTEN, TEXT_CALLS, ['sum_up{"x": 1}<|eot|>']),
    (WRITTEN, CALLS[:2], ['sum_up{"x": 1}<|eot|>']),
    (UNASKED, BLANKS, ["  Yes. \n<|im_end|>", "\n  No.<|im_end|>"]),
    (UNASKED, FIRST, ["Hello.<|im_end|>", "Yes.<|im_end|>"]),
    (HEADED, SYSTEM, ["Yes.\n### end", "No.\n### end"]),
    (HEADED, TWICE, ["Yes.\n### end", "Sure.\n### end"]),
    (FOOT, TWO[:3], ["Yes.\n### end"]),
    (ZEPHYR, FIRST, ["\nHello.</s>", "\nYes.</s>"]),
    (STOP, TWO, ["Yes.<stop>\n", "No.<stop>\n"]),
    (LINE_BLOCK, BLANKS, ["  Yes. \n\n### end", "\n  No.\n### end"]),
    (BLOCK, BLANKS, ["  Yes. \n<|end|>", "\n  No.<|end|>"]),
    (MACRO, TWO, ["Yes.<|end|>", "No.<|end|>"]),
    (LINE, BLANKS, ["  Yes. \n\n### end", "\n  No.\n### end"]),
    (REFUSES, TWO, ["Yes.<|end|>", "No.<|end|>"]),
]  # fmt: skip
# Where a turn ends is a matter of tokens there.
NEEDED = dict.fromkeys((PHI, REFUSES, ALIKE, STOP), "special, added")
WORDS = (
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|start|>", "<|end_header|>",
    "<|eot|>", "<turn>", "<eot>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|end|>", "<user>",
    "<assistant>", "<stop>\n", "<|tool|>",
)  # fmt: skip


def save(
    directory: Path,
    template: str | dict[str, str] | None,
    words: str = "special",
    trim: bool = False,
    *,
    blank: bool = False,
) -> PromptTokenizer:
    """A tokenizer of bytes or, with a blank before each text, of characters; the words are special, added or text."""
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁", *(f"<0x{i:02X}>" for i in range(256))]
    known = {token: i for i, token in enumerate(("<s>", "</s>", *WORDS, *alphabet, "▁Y", "ĊĊ", "ĠY"))}
    merges = [("▁", "Y"), ("Ċ", "Ċ"), ("Ġ", "Y")]
    backend = Tokenizer(models.BPE(known, merges=merges, byte_fallback=blank))
    if blank:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        replace = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*replace, decoders.Strip(" ", 1, 0)])
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder, backend.post_processor = (decoders.ByteLevel(), processors.ByteLevel(trim_offsets=trim))
    special = ("<s>", "</s>", *(WORDS if words == "special" else ()))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if words == "added":
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in WORDS])
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=list(special[2:]),
        chat_template=template,
    ).save_pretrained(directory)
    return PromptTokenizer(str(directory))


def learnt(tokenizer: PromptTokenizer, messages: list[dict[str, Any]], stops: Collection[int] = ()) -> list[str]:
    """The runs of tokens with loss, as text."""
    [(ids, mask)] = tokenizer.conversations([messages], stops)
    return runs(tokenizer, ids, mask)


def runs(tokenizer: PromptTokenizer, ids: Ids, mask: Mask) -> list[str]:
    """The runs of tokens with loss, as text."""
    cuts = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(ids[a:b]) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


@pytest.mark.parametrize("trim", [True, False], ids=["trimmed offsets", "whole offsets"])
@pytest.mark.parametrize("words", ["special", "added", "text"])
def test_what_is_learnt(tmp_path: Path, words: str, trim: bool):
    wrong = []
    for k, (template, messages, wanted) in enumerate(TABLE):
        if words not in NEEDED.get(template, words):
            continue
        got = learnt(save(tmp_path / str(k), template, words, trim), messages)
        wrong += [(k, got, wanted)] if got != wanted else []
    assert wrong == []


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (HIDES, TWO, "does not show the assistant's turn 1"),
        (INSIDE, SAYS_AND_CALLS, r"puts message 2 \(tool\) into a turn of the assistant"),
        (PHI, CALLS, "does not show the assistant's turn 1"),
        (HARD, TWO, "shows the assistant's turn 1, but not where it begins and ends"),
        (GEMMA, TWICE, "roles must alternate"),
        (BLOCK + "{{ '{% generation %}' if false }}", TWO, "blocks cannot be marked"),
        (MACRO.replace("{- say(m)", "{- say(m) | trim"), BLANKS, "its text changes"),
    ],
    ids=["hidden", "result inside", "hidden calls", "ambiguous", "refused", "block in a string", "changed block"],
)
def test_what_cannot_be_found_is_named(tmp_path: Path, template: str, messages: list[dict[str, Any]], reason: str):
    with pytest.raises(DataError, match=reason):
        learnt(save(tmp_path, template, "added"), messages)


def test_conversations_with_tools_have_the_template_for_them(tmp_path: Path):
    content = BLOCK.replace("+ '<|end|>\\n' }}{%- endg", "}}{%- endg").replace(
        "endgeneration %}", "endgeneration %}<|end|>"
    )
    tokenizer = save(tmp_path, {"default": PHI, "tool_use": content})
    assert learnt(tokenizer, TWO[:2]) == ["Yes.<|end|>"]
    assert learnt(tokenizer.with_tools([CALL]), TWO[:2]) == ["Yes."]


def test_a_stop_token_behind_a_turn_is_learnt(tmp_path: Path):
    tokenizer, stops = save(tmp_path, GLM), [WORDS.index(word) + 2 for word in ("<|user|>", "<|tool|>")]
    assert learnt(tokenizer, TWO, stops) == ["\nYes.<|user|>", "\nNo."]
    assert learnt(tokenizer, CALLS, stops) == [f"\n<tool_call>{SHOWN}</tool_call><|tool|>", "\nThree."]


@pytest.mark.parametrize(
    ("template", "messages", "incomplete"),
    [
        (LLAMA, CALLS, False),
        (LLAMA, SAYS_AND_CALLS, True),
        (PHI, SAYS_AND_CALLS, True),
        (QWEN3, THINKS, False),
        (QWEN3, REASONS, False),
        (DEEPSEEK, THINKS, True),
        (PHI, REASONS, True),
        ("sum_up of 3" + PHI, SAYS_AND_CALLS, True),
        (None, REASONS, True),
    ],
)
def test_what_the_template_leaves_out_is_noted(
    tmp_path: Path, template: str | None, messages: list[dict[str, Any]], incomplete: bool
):
    [talk] = save(tmp_path, template).conversations([messages])
    assert talk.incomplete is incomplete


FLAGGED: list[tuple[str | None, list[dict[str, Any]], dict[str, Any], list[str] | str]] = [
    # template, conversation, what turn 1 says of its loss, what is learnt or wrong
    (PHI, TWO, {"weight": 0}, ["No.<|end|>"]),
    (QWEN3, TWO, {"train": False}, ["<think>\n\n</think>\n\nNo.<|im_end|>"]),
    (BLOCK, TWO, {"loss_mask": 0.0}, ["No.<|end|>"]),
    (None, TWO, {"trainable": False, "weight": 1}, ["No.</s>"]),
    (LLAMA, TWICE, {"loss": False}, ["Sure.<|eot|>"]),
    (PHI, TWO, {"weight": 1, "loss": True, "training": None}, ["Yes.<|end|>", "No.<|end|>"]),
    (PHI, TWO[:2], {"weight": 0}, "1 with nothing to learn that the assistant says"),
    (PHI, TWO, {"weight": 0.5}, "row 1, turn 1: `weight` = 0.5 "),
    (PHI, TWO, {"train_detail": [{"train": False}]}, "row 1, turn 1: `train_detail` = [{"),
    (PHI, TWO, {"train": "false"}, "row 1, turn 1: `train` = 'false' "),
    (BLOCK.replace("== 'assistant'", "== 'assistant' and loop.last"), TWO, {"weight": 0}, "1 of them for 2 turns"),
]


@pytest.mark.parametrize(("template", "messages", "flags", "wanted"), FLAGGED)
def test_turns_that_are_marked_are_not_learnt(
    tmp_path: Path,
    template: str | None,
    messages: list[dict[str, Any]],
    flags: dict[str, Any],
    wanted: list[str] | str,
):
    shown = template and template.replace("{%- for", "{{- messages[1].weight if messages[1] }}{%- for", 1)
    tokenizer = save(tmp_path / "model", shown)
    flagged = [*messages[:1], messages[1] | flags, *messages[2:]]
    rows = write(tmp_path / "rows.jsonl", [{"conversations": flagged}])
    cfg = config(tmp_path / "model", rows, {"type": "sft", "system_prompt": ""})
    if isinstance(wanted, str):
        with pytest.raises(DataError, match=re.escape(wanted)):
            prepare(cfg, tmp_path)
        return
    prepare(cfg, tmp_path)
    file = PromptFile(tmp_path / "data" / "train.safetensors")
    assert runs(tokenizer, file.token_ids(0), file.loss_mask(0)) == wanted
    [whole] = tokenizer.conversations([messages])
    assert file.token_ids(0).tolist() == whole.ids.tolist(), "the flag is not shown to the template"
    noted = report_of(tmp_path).files["train"].noted
    assert any("not learnt" in note for note in noted) is (len(wanted) == 1)


ASSISTANT = "assistant: "
IDS: list[tuple[str, list[dict[str, Any]], bool, str, bool]] = [
    # template, conversation, a blank before each text, tokens of the learnt turn, whether the whole has others
    (PHI, TWO[:2], False, "Y e s . <|end|>", False),
    (PHI, BLANKS[:2], False, "Ġ ĠY e s . Ġ Ċ <|end|>", False),
    (BETWEEN, TWO[:2], False, "ĠY e s .", False),
    (BETWEEN.replace("assistant:", ASSISTANT), TWO[:2], False, "Y e s .", True),
    (PHI, talk("Two?", "\nYes."), False, "Ċ Y e s . <|end|>", True),
    (MISTRAL, TWO[:2], True, "▁ ▁Y e s . </s>", False),
    (BETWEEN, TWO[:2], True, "▁Y e s .", False),
    (BETWEEN.replace("assistant:", ASSISTANT), TWO[:2], True, "Y e s .", True),
    ("", TWO[:2], True, "Y e s . </s>", False),
]


@pytest.mark.parametrize(("template", "messages", "blank", "tokens", "differs"), IDS)
def test_tokens_are_those_that_generation_sees(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], blank: bool, tokens: str, differs: bool
):
    tokenizer = save(tmp_path, template or None, blank=blank)
    [talk] = tokenizer.conversations([messages])
    [prompt] = tokenizer.prompts([messages[:1]])
    assert talk.ids[: len(prompt)].tolist() == prompt.tolist()
    assert tokenizer._tokenizer.convert_ids_to_tokens(talk.ids[talk.mask == 1].tolist()) == tokens.split()
    assert talk.differs is differs


@pytest.mark.parametrize(
    ("template", "generation", "sampling", "endless"),
    [
        (PHI, {"eos_token_id": [1]}, {}, 2),
        (PHI, {"eos_token_id": [1, WORDS.index("<|end|>") + 2]}, {}, 0),
        (PHI, {}, {"stop_token_ids": [WORDS.index("<|end|>") + 2]}, 0),
        (PHI, {}, {"stop": ["<|end|>"]}, 0),
        (LINE, {}, {"stop": ["# end"]}, 0),
        (LINE, {}, {"stop": ["Yes."]}, 2),
        (MISTRAL, {}, {}, 0),
    ],
)
def test_rows_that_no_stop_ends_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, generation: Any, sampling: Any, endless: int
):
    save(tmp_path / "model", template)
    write(tmp_path / "model" / "generation_config.json", generation)
    rows = [{"conversations": messages} for messages in (TWO, talk("Two?", "\nYes."))]
    cfg = config(
        tmp_path / "model",
        write(tmp_path / "rows.jsonl", rows),
        {"type": "sft"},
        rollout={"sampling_config": sampling},
    )
    with caplog.at_level(logging.WARNING):
        prepare(cfg, tmp_path)
    report = report_of(tmp_path)
    assert report.files["train"].without_stop.count == endless
    assert [f"of {endless} conversations is none" in text for text in report.warnings] == [True] * bool(endless)
    assert report.files["train"].encoded_apart.count == (template != MISTRAL)
