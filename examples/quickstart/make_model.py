"""Make the quickstart's model on the spot: `python examples/quickstart/make_model.py --out DIR [--seed N]`.

A Qwen3 of 0.33M parameters with random weights, and a tokenizer of bytes: every character is a token, and so
are `<think>`, `</think>` and `\\boxed{`, because those are what the task's rewards look for. Two layers are
enough to add column by column. The weights are drawn with a standard deviation of 0.06: at this width the
default of 0.02 learns nothing within the quickstart's budget.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, END, *ROLES)
WHOLE_TOKENS = ("<think>", "</think>", "\\boxed{")
MAX_LENGTH = 256

# One token for a role: half of a prompt would be chat template otherwise. The assistant's turn stands in a
# generation block, so that supervised training learns it and nothing else.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(out: Path) -> int:
    """Save the tokenizer; answers the size of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in WHOLE_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(out)
    return len(tokenizer)


def make_model(out: Path, seed: int, experts: int = 0) -> int:
    """Save model and tokenizer where transformers and vLLM load them; answers the number of parameters.

    experts: in each layer, two of which see a token; 0: the layers have none.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3MoeConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    vocabulary = make_tokenizer(out)
    end, pad = SPECIAL_TOKENS.index(END), SPECIAL_TOKENS.index(PAD)
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = (Qwen3MoeConfig if experts else Qwen3Config)(
        **(mixture if experts else {}),
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.06,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    model.save_pretrained(out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's model.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--seed", type=int, default=42, help="seed of the weights (default: 42)")
    parser.add_argument("--experts", type=int, default=0, help="experts in each layer (default: none)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parameters = make_model(options.out, options.seed, options.experts)
    print(f"made a Qwen3 of {parameters:,} parameters in {options.out}")


if __name__ == "__main__":
    main()
