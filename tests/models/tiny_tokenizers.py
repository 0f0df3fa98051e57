"""Tiny tokenizers, one for each way in which tokens decode to text."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the quick brown fox jumps over the lazy dog 0123456789 ",
    "größe naïve 日本語 日本 👍🏽 👍 😀😁 é\n",
] * 9
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = [AddedToken(token, special=True, normalized=False) for token in ("<|im_start|>", "<|im_end|>", "<unlisted>")]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Train a tokenizer like GPT-2's: tokens are bytes, some end inside a character, random ones are not UTF-8."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=CHATML
    )


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Build a tokenizer like Llama 2's: words include the space before them, unknown characters become bytes."""
    words = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!", "▁t", "▁th", "▁the", "▁f", "▁fo", "▁fox"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "f"), ("▁f", "o"), ("▁fo", "x")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def word_pieces() -> PreTrainedTokenizerFast:
    """Build a tokenizer like BERT's: decoding puts a space before every token that does not start with ##."""
    tokens = ["[UNK]", "the", "fox", "##es", "jump", "##ing", ".", "'"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
