"""A tiny random Llama in a folder, which a command can load quickly."""

from pathlib import Path

import torch
import transformers as tf

from models.tiny_tokenizers import byte_level


def save_model(folder: Path, *, layers: int = 3, seed: int = 0, endless: bool = False) -> Path:
    """Save a model whose distributions are not flat. `endless` has no end token, so that a text can be interrupted."""
    tokenizer = byte_level()
    torch.manual_seed(seed)
    config = tf.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=layers,
        intermediate_size=48,
        max_position_embeddings=8192 if endless else 1024,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=None if endless else tokenizer.eos_token_id,
    )
    tf.AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
