"""Build the tiny random models that decoders are audited on: a pass takes a millisecond, and every defect is there."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
import transformers as tf
from jaxtyping import Float
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

V = 64
"""Vocabulary size: too large to count three tokens jointly, so that the bets decide, as with real models."""
SPREAD = 1.5
"""Standard deviation of the logits: distributions are neither flat nor certain."""
NOISE = 0.6
"""Noise in a draft model's output rows, in their standard deviations: about half of three draft tokens are accepted."""
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_END = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
REPEATING = (0, 1, 2, 3, 0, 1, 2, 5, 0, 1)
PROMPTS = [[(7 * i + j) % V for j in REPEATING] for i in range(32)]
"""Prompts that repeat themselves, so that a drafter that copies finds matches."""
WORDS = tuple(f"w{i}" for i in range(30))
"""Words that both tokenizers have."""
WORD_PROMPTS = [[1 + (7 * i + j) % len(WORDS) for j in range(6)] for i in range(8)]


@cache
def llama(vocab_size: int = V, seed: int = 0) -> tf.LlamaForCausalLM:
    config = tf.LlamaConfig(
        vocab_size=vocab_size, num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False,
        initializer_range=0.3, **SIZES, **NO_END,
    )  # fmt: skip
    return _spread(tf.LlamaForCausalLM, config, seed)


def _spread(kind: Any, config: Any, seed: int) -> Any:
    """Make a model with random weights, and scale its output rows to `SPREAD`."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = kind(config).eval()
        logits = model(torch.randint(config.vocab_size, (200, 8))).logits
        model.get_output_embeddings().weight *= SPREAD / logits.std()
    return model


@cache
def noisy_llama() -> tf.LlamaForCausalLM:
    """Return the target with noise in its output rows: a draft model of the same vocabulary."""
    model = deepcopy(llama())
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        head = model.lm_head.weight
        head += torch.randn_like(head) * NOISE * head.std()
    return model


def word_level(*words: str) -> tf.PreTrainedTokenizerFast:
    """Build a tokenizer whose tokens are these words, after one for all others."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("[UNK]", *words))}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


@cache
def two_tokenizers() -> tuple[tf.PreTrainedTokenizerFast, tf.PreTrainedTokenizerFast]:
    """Return a target's tokenizer, and an assistant's with ten more words between the target's."""
    more = (w for i, own in enumerate(WORDS) for w in ((f"only{i}", own) if i % 3 == 0 else (own,)))
    return word_level(*WORDS), word_level(*more)


@cache
def gemma4() -> tuple[Any, Any]:
    """Return a Gemma 4 and its assistant, which reads the target's keys and values and drafts three tokens."""
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 8}
    plain = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "max_position_embeddings": 512}
    sizes = {"vocab_size": V, "initializer_range": 0.3, **SIZES, **NO_END, **layers, **heads, **plain}
    target = _spread(tf.Gemma4ForCausalLM, tf.Gemma4TextConfig(**sizes), 0)
    config = tf.Gemma4AssistantConfig(
        text_config=tf.Gemma4TextConfig(**sizes, num_kv_shared_layers=SIZES["num_hidden_layers"]),
        backbone_hidden_size=SIZES["hidden_size"],
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        assistant = tf.Gemma4AssistantForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = 3
    return target, assistant


def gemma4_drafts() -> Callable[[Sequence[int]], Float[Tensor, " V"]]:
    """Return the distribution that the assistant's logits declare for the first draft token after a text."""
    target, assistant = gemma4()

    @torch.no_grad()
    def declared(tokens: Sequence[int]) -> Float[Tensor, " V"]:
        ids = torch.tensor([list(tokens)])
        seen = target(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        embedded = target.get_input_embeddings()(ids[:, -1:])
        logits = assistant(
            inputs_embeds=torch.cat([embedded, seen.hidden_states[-1][:, -1:]], -1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=seen.shared_kv_states,
        ).logits
        return logits[0, -1].double().softmax(-1)

    return declared
