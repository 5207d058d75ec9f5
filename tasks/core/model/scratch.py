"""A tiny Qwen3 with a tokenizer of its own, built from nothing: the same seed and texts give the same bytes."""

from pathlib import Path
from typing import Any

from configs.errors import ConfigError, DataError
from configs.schema import Scratch
from tasks.core.storage.jsonl import each_row

PAD, EOS, USER, ASSISTANT, SYSTEM = SPECIAL = ["<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>"]
CONTEXT = 4096  # positions; rotary embeddings make a longer context cost nothing

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}<|system|>{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% else %}<|assistant|>{{ message['content'] }}<|eos|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build(size: Scratch, demonstrations: Path, seed: int, folder: Path) -> dict[str, Any]:
    """Writes the model and its tokenizer to `folder`; returns {"parameters": int, "vocabulary": int}.

    `demonstrations` is JSON Lines with `prompt` (messages) and `completion`. Raises DataError when there is no text in it.
    """
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    tokenizer = train_tokenizer(_texts(demonstrations), size.vocab_size)
    config = model_config(size, len(tokenizer))
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, do_sample=False
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)}


def model_config(size: Scratch, vocabulary: int) -> Any:
    """The Qwen3 configuration of this size, with tied embeddings and float32 weights. Raises ConfigError for an odd `head_dim`."""
    from transformers import Qwen3Config

    if size.head_dim % 2:
        raise ConfigError(
            f"model.scratch.head_dim is {size.head_dim}, and rotary embeddings need an even number: set it to {size.head_dim - 1} or {size.head_dim + 1}"
        )

    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        dtype="float32",
    )


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer in which every digit is a token of its own, so that numbers are made of what sums are made of."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def _texts(demonstrations: Path) -> list[str]:
    texts = [
        text
        for row in each_row(demonstrations)
        for text in (*(message["content"] for message in row["prompt"]), row["completion"])
    ]
    if not any(texts):
        raise DataError(
            f"{demonstrations.name} holds no text to train the tokenizer of model.name = scratch on: give demonstrations"
        )
    return texts
