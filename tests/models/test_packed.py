"""Packed passes over a KV pool equal a plain forward of each row, and a row's bits do not depend on its neighbours."""

from functools import cache

import pytest
import torch
import transformers as tf

from draftproof.models import packed
from draftproof.models.cpu_linear import pack, packable
from draftproof.models.hf import HFModel
from draftproof.models.rows import Block, PooledRows, Reading
from models.families import LLAMA, V, family
from models.reference import TOLERANCE, branch

GPT_OSS = {**LLAMA, "head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA4 = {**LLAMA, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "moe_layers": []}
MORE = {
    "gpt-oss": lambda: tf.GptOssConfig(**GPT_OSS),
    "llama4-chunked": lambda: tf.Llama4TextConfig(**LLAMA4, no_rope_layers=[1, 1, 0]),
}
NAMES = ["llama", "gpt2", "mistral-window", "qwen2-window", "gemma2", "gemma3", *MORE]
"""Full attention, positions by table, windows in all or some layers, softcap, sinks, chunks."""


@cache
def model_of(name):
    if name not in MORE:
        return family(name)
    torch.manual_seed(0)
    config = MORE[name]()
    config.initializer_range = 0.3
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if "sinks" in parameter_name:
            parameter.data.normal_(0, 2)
    return model


@cache
def served(name):
    return HFModel(model_of(name))


@torch.no_grad()
def plain(name, text):
    return model_of(name)(torch.tensor([list(text)]), use_cache=False).logits[0]


def texts(*lengths, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (n,), generator=numbers).tolist() for n in lengths]


def rows_of(name, texts, pages=24):
    """Return rows that have read all but the last token of these texts."""
    rows = PooledRows(served(name), pages)
    for row, text in enumerate(texts):
        rows.enter(row, len(text))
    rows.score([], reading=[Reading(row, text[:-1]) for row, text in enumerate(texts)])
    return rows


def off(found, expected):
    return float((found - expected).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_ragged_widths_equal_a_plain_forward_over_several_rounds(name):
    """Rows of several widths, one of them 1, are scored while another row's prompt is read in chunks."""
    rounds = texts(11, 2, 17, 1, 9)
    rows = rows_of(name, rounds)
    drafts, [prompt] = texts(5, 5, 5, 5, 5, seed=1), texts(30, seed=2)
    rows.enter(9, 40)
    for widths, kept, (first, stop) in (
        ([3, 1, 6, 2, 3], [2, 1, 6, 1, 1], (0, 13)),
        ([1, 4, 2, 6, 1], [1] * 5, (13, 30)),
    ):
        tokens = torch.tensor([[text[-1], *draft] for text, draft in zip(rounds, drafts, strict=True)])
        scores = rows.score([Block(range(5), tokens, widths)], reading=[Reading(9, prompt[first:stop], scored=True)])
        seen = set()
        for group in scores.groups[0]:
            width = group.forward.logits.shape[1]
            for b, logits in zip(group.members, group.forward.logits, strict=True):
                seen.add((b, width))
                expected = plain(name, rounds[b] + drafts[b][: width - 1])[-width:]
                assert off(logits, expected) < TOLERANCE
        assert seen == set(enumerate(widths))
        assert off(scores.read[0].logits, plain(name, prompt[:stop])[first:]) < TOLERANCE
        rows.keep(range(5), kept)
        rounds = [[*text, *draft[: n - 1], 7] for text, draft, n in zip(rounds, drafts, kept, strict=True)]


PARENTS = [-1, 0, 0, -1, 3, 1]


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_equals_its_branches_and_the_kept_path_is_cached(name):
    rounds, drafts = texts(11, 2, 8), texts(6, 6, 6, seed=1)
    rows = rows_of(name, rounds)
    tokens = torch.tensor([[text[-1], *draft] for text, draft in zip(rounds, drafts, strict=True)])
    scores = rows.score([Block(range(3), tokens, None, torch.tensor([PARENTS] * 3))])
    [group] = scores.groups[0]
    for b, (text, draft) in enumerate(zip(rounds, drafts, strict=True)):
        for slot in range(-1, len(PARENTS)):
            expected = plain(name, text + [draft[s] for s in branch(PARENTS, slot)])[-1]
            assert off(group.forward.logits[b, slot + 1], expected) < TOLERANCE
    paths = [[3, 4], [0, 1, 5], []]
    rows.keep(range(3), [len(path) + 1 for path in paths], torch.tensor([p + [-1] * (6 - len(p)) for p in paths]))
    rounds = [[*text, *[draft[s] for s in path], 5] for text, draft, path in zip(rounds, drafts, paths, strict=True)]
    again = rows.score([Block(range(3), torch.tensor([[text[-1], 9] for text in rounds]))])
    for b, text in enumerate(rounds):
        assert off(again.groups[0][0].forward.logits[b], plain(name, [*text, 9])[-2:]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_trees_and_chains_share_a_pass(name):
    rounds, drafts = texts(11, 7), texts(6, 3, seed=1)
    rows = rows_of(name, rounds)
    tree = Block([0], torch.tensor([[rounds[0][-1], *drafts[0]]]), None, torch.tensor([PARENTS]))
    chain = Block([1], torch.tensor([[rounds[1][-1], *drafts[1]]]))
    made = rows.score([tree, chain]).groups
    deep = [drafts[0][slot] for slot in branch(PARENTS, 5)]
    assert off(made[0][0].forward.logits[0, 6], plain(name, rounds[0] + deep)[-1]) < TOLERANCE
    assert off(made[1][0].forward.logits[0], plain(name, rounds[1] + drafts[1])[-4:]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_one_row_in_one_pass_equal_separate_passes(name):
    """Spans of a row follow each other: a later one attends to the keys that an earlier one writes in the same pass."""
    [text] = texts(40)
    borders = [(0, 16), (16, 32), (32, 40)]
    together = rows_of(name, [[1]])
    together.ensure(0, 40)
    read = together.score([], reading=[Reading(0, text[a:b], scored=True) for a, b in borders]).read
    assert together.length(0) == 40
    assert off(torch.cat([each.logits for each in read]), plain(name, text)) < TOLERANCE
    one_by_one = rows_of(name, [[1]])
    one_by_one.ensure(0, 40)
    for (a, b), each in zip(borders, read, strict=True):
        [alone] = one_by_one.score([], reading=[Reading(0, text[a:b], scored=True)]).read
        assert off(alone.logits, each.logits) < 1e-5


def test_a_row_that_must_grow_for_its_chunks_moves_before_the_first_of_them():
    [text] = texts(120)
    rows = PooledRows(served("llama"), 6)
    rows.enter(0, 10)
    rows.enter(1, 10)  # so that row 0 cannot grow in place
    rows.score([], reading=[Reading(0, text[:40]), Reading(1, [5, 6])])
    read = rows.score([], reading=[Reading(0, text[a:b], scored=True) for a, b in ((40, 64), (64, 120))]).read
    assert rows.pool.rows[0].extent.first != 0, "it has moved"
    assert off(torch.cat([each.logits for each in read]), plain("llama", text)[40:]) < TOLERANCE


def test_a_wrong_span_is_found(monkeypatch):
    """A control: spans that start where the row started, not where the chunk before ended."""

    def overlapping(self, reading):
        return [self._span(each.row, len(each.tokens)) for each in reading]

    monkeypatch.setattr(PooledRows, "_reading_spans", overlapping)
    with pytest.raises(AssertionError):
        test_chunks_of_one_row_in_one_pass_equal_separate_passes("llama")


@pytest.mark.parametrize("name", ["mistral-window", "gemma2", "gpt-oss", "llama4-chunked"])
def test_windows_chunks_softcap_and_sinks_matter(name, monkeypatch):
    """A control: without its window, softcap or sinks the same comparison fails."""
    real = packed.attend

    def without(pieces, query, keys, values, scaling=None, softcap=None, sinks=None):
        return real(pieces, query, keys, values, scaling, None, None)

    if name in ("gemma2", "gpt-oss"):
        monkeypatch.setattr(packed, "attend", without)
    else:
        made = packed._piece
        monkeypatch.setattr(packed, "_piece", lambda span, stop, kind, size, *rest: made(span, stop, kind, None, *rest))
    with pytest.raises(AssertionError):
        test_chunks_of_one_row_in_one_pass_equal_separate_passes(name)


# --------------------------------------------------------------------------------------------------- bit for bit

needs_packing = pytest.mark.skipif(not packable(torch.nn.Linear(2, 2)), reason="this torch has no oneDNN")
WIDE = {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2}
WIDE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.1}


@cache
def packed_llama():
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**WIDE)).eval()
    pack(model)
    return HFModel(model)


def wide_texts(*lengths):
    numbers = torch.Generator().manual_seed(5)
    return [torch.randint(500, (n,), generator=numbers).tolist() for n in lengths]


@needs_packing
@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_chunks_in_one_pass_equal_separate_passes_bit_for_bit(chunks):
    [text] = wide_texts(64 * chunks)
    read = [Reading(0, text[a : a + 64]) for a in range(0, len(text), 64)]
    together, apart = (PooledRows(packed_llama(), 10) for _ in range(2))
    for rows in (together, apart):
        rows.enter(0, len(text))
    together.score([], reading=read)
    for chunk in read:
        apart.score([], reading=[chunk])
    n = len(text)
    for one, other in zip(
        (*together.pool.keys, *together.pool.values), (*apart.pool.keys, *apart.pool.values), strict=True
    ):
        assert torch.equal(one[:n], other[:n])


@needs_packing
@pytest.mark.parametrize("others", [1, 2, 7, 31, 63])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_row_has_the_same_bits_alone_and_among_others(others, width):
    rounds = wide_texts(*[10 + 3 * i % 50 for i in range(others + 1)])

    def scored(names):
        rows = PooledRows(packed_llama(), 140)
        for row in names:
            rows.enter(row, len(rounds[row]))
        for row in names:
            rows.score([], reading=[Reading(row, rounds[row][:-1])])
        tokens = torch.tensor([[rounds[row][-1], *range(5)][:width] for row in names])
        [[group]] = rows.score([Block(names, tokens)], layers=(1,)).groups
        at = names.index(0)
        return group.forward.logits[at], group.forward.hidden[0][at]

    alone, among = scored([0]), scored([*range(1, others // 2 + 1), 0, *range(others // 2 + 1, others + 1)])
    assert torch.equal(alone[0], among[0])
    assert torch.equal(alone[1], among[1])
