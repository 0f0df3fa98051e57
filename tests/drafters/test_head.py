"""Head drafts have the states and distributions of whole passes of the head without a cache."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from drafters.toy_rounds import Row, rng_of, row
from draftproof.core.distribution import DraftVocab
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams, warp
from draftproof.core.types import PAD, ROOT, History
from draftproof.drafters.head import GREEDY_CONFIDENCE, HeadDrafter
from draftproof.drafters.head_reader import MAX_BATCHED, HeadReader
from draftproof.drafters.head_tree import Level
from draftproof.drafters.interface import TargetOutputs
from draftproof.models.head.network import FittedHead, attend
from draftproof.models.head.taps import embeddings, output_rows
from engine.tiny import V, llama
from engine.tiny_heads import IDS, trained

GREEDY, WARM = SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_k=4)
TEXT = [0, 1, 2, 3, 0, 1, 2, 5, 0, 1, 6, 4]


def unpacked(size: int = V) -> FittedHead:
    """Attach the head in plain float32, so that numbers can be compared."""
    ids = torch.tensor(IDS[:size])
    rows = nn.Linear(16, size, bias=False).requires_grad_(False)
    rows.weight.copy_(output_rows(llama(), ids))
    return FittedHead(trained(), embeddings(llama()), rows, DraftVocab.of(ids, V))


@torch.no_grad()
def states(tokens: list[int]) -> list[torch.Tensor]:
    """Compute the target's hidden states of a text, one tensor per tap."""
    hidden = llama()(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    return [hidden[tap][0] for tap in trained().shape.taps]


def outputs(tokens: list[int], first: int = 0) -> TargetOutputs:
    """Make the target outputs of all tokens but the last, from `first` on."""
    n = len(tokens) - 1
    return TargetOutputs(n, None, tuple(tap[first:n] for tap in states(tokens)))


def asked(tokens: list[int], sampling: SamplingParams = WARM, name: int = 0, first: int = 0) -> Row:
    made = row(name, tokens, sampling)
    made.target_outputs = outputs(tokens, first)
    return made


def logits(tokens: list[int], drafted: list[int], size: int = V) -> torch.Tensor:
    """Compute the head's logits after text and draft without a cache; after the text it reads its own states."""
    head, text = trained(), [*tokens, *drafted]
    h = head.fuse([tap[None, : len(tokens) - 1] for tap in states(tokens)])
    for step in range(len(drafted) + 1):
        n = len(tokens) - 1 + step
        embedded = embeddings(llama())[torch.tensor([text[1 : n + 1]])]
        q, k, v = head.heads(embedded, h, torch.arange(n)[None])
        made = head.rest(h, attend(q, k, v, torch.ones((1, n, n), dtype=torch.bool).tril()))
        h = torch.cat([h, made[:, -1:]], 1)
    return head.out(h[0, -1]) @ output_rows(llama(), torch.tensor(IDS[:size])).T


def test_every_distribution_is_the_heads_own_warped():
    context = asked(TEXT)
    draft = HeadDrafter(unpacked()).propose([context], [4], rng_of([context]))
    assert draft.lengths.tolist() == [4]
    tokens = draft.tokens[0].tolist()
    for j in range(4):
        scores = logits(TEXT, tokens[:j])
        dist = warp(scores[None, None], [WARM], vocab=DraftVocab.of(torch.tensor(IDS), V))
        torch.testing.assert_close(draft.q.probs()[:, j], dist.probs()[:, 0])


def test_greedy_tokens_are_the_heads_most_likely_and_carry_no_distribution():
    context = asked(TEXT, GREEDY)
    draft = HeadDrafter(unpacked()).propose([context], [3], rng_of([context]))
    tokens: list[int] = []
    for _ in range(3):
        tokens.append(IDS[int(logits(TEXT, tokens).argmax())])
    assert draft.tokens.tolist() == [tokens]
    assert draft.q is None


def test_drafted_states_are_dropped_and_kept_tokens_are_read_with_true_states():
    context, drafter = asked(TEXT[:5]), HeadDrafter(unpacked())
    for stop in (7, 8, 12):
        drafter.propose([context], [4], rng_of([context]))
        before = len(context.tokens)
        context.tokens = TEXT[:stop]
        context.target_outputs = outputs(context.tokens, before - 1)
    draft = drafter.propose([context], [2], rng_of([context]))
    torch.testing.assert_close(draft.q.logits[0, 0], logits(TEXT, []))
    assert not drafter._memory.rows[0].waiting, "nothing is read twice"


def test_states_received_while_k_was_zero_are_read_later():
    context, drafter = asked(TEXT[:5]), HeadDrafter(unpacked())
    for stop in (7, 8, 12):
        assert drafter.propose([context], [0], rng_of([context])).lengths.tolist() == [0]
        before = len(context.tokens)
        context.tokens = TEXT[:stop]
        context.target_outputs = outputs(context.tokens, before - 1)
    draft = drafter.propose([context], [1], rng_of([context]))
    torch.testing.assert_close(draft.q.logits[0, 0], logits(TEXT, []))


def test_states_of_rounds_that_the_host_does_not_follow_are_read_before_they_are_too_many(monkeypatch):
    """A round on a device tells its states before the host knows the tokens after them."""
    monkeypatch.setattr("draftproof.drafters.head_reader.MOST_UNREAD", 8)
    text = torch.randint(V, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    context, drafter, every = asked(text[:5]), HeadDrafter(unpacked()), states(text)
    drafter.propose([context], [0], rng_of([context]))
    unread, n = [], 5
    while n < 37:
        emitted = 1 + n % 3
        drafter.device_missed(context, tuple(tap[n - 1 : n - 1 + emitted] for tap in every))
        unread.append(sum(len(part[0]) for part in drafter._memory.rows[0].waiting))
        n += emitted
        context.tokens, context.target_outputs = text[:n], None
    assert max(unread) <= 8 + 2
    draft = drafter.propose([context], [1], rng_of([context]))
    torch.testing.assert_close(draft.q.logits[0, 0], logits(text[:n], []))


@pytest.mark.parametrize("length", [MAX_BATCHED, MAX_BATCHED + 1, MAX_BATCHED + 2, 60])
def test_a_long_prompt_is_read_in_parts(length, monkeypatch):
    monkeypatch.setattr("draftproof.drafters.head_reader.POSITIONS_PER_PASS", 7)
    text = torch.randint(V, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    contexts = [asked(TEXT, name=1), asked(text)]
    draft = HeadDrafter(unpacked()).propose(contexts, [2, 2], rng_of(contexts))
    for b, tokens in enumerate((TEXT, text)):
        torch.testing.assert_close(draft.q.logits[b, 0], logits(tokens, []))
        torch.testing.assert_close(draft.q.logits[b, 1], logits(tokens, draft.tokens[b, :1].tolist()))


def test_rows_come_and_go_and_keep_what_was_read():
    drafter = HeadDrafter(unpacked())
    first = [asked(TEXT[:6], name=0), asked(TEXT[:9], name=1), asked(TEXT[:4], name=2)]
    drafter.propose(first, [3, 3, 3], rng_of(first))
    stays = Row(1, TEXT[:11], 9, WARM, outputs(TEXT[:11], 8))
    again = [asked(TEXT[2:8], name=7), stays]
    draft = drafter.propose(again, [2, 2], rng_of(again))
    torch.testing.assert_close(draft.q.logits[0, 0], logits(TEXT[2:8], []))
    torch.testing.assert_close(draft.q.logits[1, 0], logits(TEXT[:11], []))


def test_the_cache_grows_with_the_text():
    text = torch.randint(V, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    context, drafter = asked(text), HeadDrafter(unpacked())
    for _ in range(60):
        drafter.propose([context], [2], rng_of([context]))
        n = len(context.tokens)
        context.tokens += [1, 2, 3, 4, 5]
        context.target_outputs = TargetOutputs(n + 4, None, tuple(torch.zeros(5, 16) for _ in trained().shape.taps))
    assert drafter._memory.pool.pool.rows[context.id].extent.slots >= 340


def test_without_states_there_is_no_draft():
    drafter = HeadDrafter(unpacked())
    unknown, known, late = row(0, TEXT, WARM), asked(TEXT, name=1), asked(TEXT, name=2)
    late.tokens = [*TEXT, 3]  # the state of the token before the last is missing
    contexts = [unknown, known, late, row(3, [4], WARM)]
    assert drafter.propose(contexts, [3] * 4, rng_of(contexts)).lengths.tolist() == [0, 3, 0, 0]
    alone = HeadDrafter(unpacked()).propose([unknown], [3], rng_of([unknown]))
    assert alone.tokens.shape == (1, 0)


def test_states_that_never_arrived_count_as_zeros():
    context = asked(TEXT, first=6)
    draft = HeadDrafter(unpacked()).propose([context], [2], rng_of([context]))
    assert draft.lengths.tolist() == [2]
    assert bool(draft.q.lse.isfinite().all())
    assert not torch.allclose(draft.q.logits[0, 0], logits(TEXT, []))


def test_penalties_count_what_was_drafted():
    wary = SamplingParams(repetition_penalty=1.7, frequency_penalty=0.9, logit_bias={2: 2.0})
    context = asked(TEXT, wary)
    context.prompt_length = 5
    draft = HeadDrafter(unpacked(6)).propose([context], [3], rng_of([context]))
    vocab = DraftVocab.of(torch.tensor(IDS[:6]), V)
    for j in range(3):
        drafted = draft.tokens[0, :j].tolist()
        history = [History(TEXT[:5], TEXT[5:] + drafted)]
        dist = warp(logits(TEXT, drafted, 6)[None, None], [wary], history, vocab=vocab)
        torch.testing.assert_close(draft.q.probs()[:, j], dist.probs()[:, 0])


def test_only_tokens_of_the_reduced_vocabulary_are_drafted():
    contexts = [asked(TEXT, SamplingParams(), name) for name in range(40)]
    draft = HeadDrafter(unpacked(3)).propose(contexts, [3] * 40, rng_of(contexts))
    assert set(draft.tokens.flatten().tolist()) == set(IDS[:3])
    assert draft.q.logits.shape == (40, 3, 3)
    outside = [token for token in range(V) if token not in IDS[:3]]
    assert float(draft.q.probs()[..., outside].sum()) == 0


def test_a_greedy_row_beside_a_warm_one_has_its_most_likely_token():
    contexts = [asked(TEXT, GREEDY, 0), asked(TEXT, WARM, 1)]
    draft = HeadDrafter(unpacked(5)).propose(contexts, [2, 2], rng_of(contexts))
    assert int(draft.tokens[0, 0]) == IDS[int(logits(TEXT, [], 5).argmax())]
    assert draft.q.point[0].tolist() == draft.tokens[0].tolist()
    assert draft.q.point[1].tolist() == [PAD, PAD]


def test_a_draft_ends_after_a_weak_token_which_is_submitted():
    contexts = [asked(TEXT, SamplingParams(), name) for name in range(30)]
    whole = HeadDrafter(unpacked()).propose(contexts, [4] * 30, rng_of(contexts))
    short = HeadDrafter(unpacked(), confidence=0.3).propose(contexts, [4] * 30, rng_of(contexts))
    weak = whole.q.log_prob(whole.tokens).cumsum(1).exp() < 0.3
    expected = torch.where(weak.any(1), weak.int().argmax(1) + 1, 4)
    assert short.lengths.tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 1


def test_a_greedy_draft_ends_where_the_head_is_unsure():
    context = asked(TEXT, GREEDY)
    whole = HeadDrafter(unpacked()).propose([context], [6], rng_of([context])).tokens[0].tolist()
    sure = [float(logits(TEXT, whole[:j]).softmax(-1).max()) for j in range(6)]
    paths = torch.tensor(sure).cumprod(0).tolist()
    short = HeadDrafter(unpacked(), confidence=1.001 * paths[2]).propose([context], [6], rng_of([context]))
    assert short.tokens[0].tolist() == whole[:3]
    assert short.q is None


def test_auto_confidence_ends_greedy_drafts_alone_and_a_fixed_length_ends_none():
    greedy, warm = [asked(TEXT, GREEDY, name) for name in range(3)], [asked(TEXT, WARM, name) for name in range(3)]
    drafter = HeadDrafter(unpacked(), confidence="auto")
    wanted = HeadDrafter(unpacked(), confidence=GREEDY_CONFIDENCE).propose(greedy, [8] * 3, rng_of(greedy))
    assert drafter.propose(greedy, [8] * 3, rng_of(greedy)).lengths.tolist() == wanted.lengths.tolist()
    assert int(wanted.lengths.max()) < 8
    assert HeadDrafter(unpacked(), confidence="auto").propose(warm, [8] * 3, rng_of(warm)).lengths.tolist() == [8] * 3


def test_a_row_without_a_valid_distribution_ends_its_draft():
    broken, sound = asked(TEXT, name=0), asked(TEXT, name=1)
    broken.target_outputs = TargetOutputs(11, None, tuple(tap * torch.nan for tap in broken.target_outputs.hidden))
    contexts = [broken, sound]
    assert HeadDrafter(unpacked()).propose(contexts, [3, 3], rng_of(contexts)).lengths.tolist() == [0, 3]
    tree = HeadDrafter(unpacked(), branches=2).propose(contexts, [3, 3], rng_of(contexts))
    assert tree.lengths.tolist() == [0, 3]


# --------------------------------------------------------------------------------------------------------- trees


def paths(tokens: list[int], depth: int) -> dict[tuple[int, ...], float]:
    """Compute the probability of every path, one path at a time."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for n in range(depth):
        for path in product(range(V), repeat=n):
            dist = logits(tokens, list(path)).double().softmax(-1)
            found |= {(*path, IDS[r]): found[path] * float(dist[r]) for r in range(V)}
    return found


def lines(draft, b: int = 0) -> list[tuple[int, ...]]:
    """Return the path that ends in each slot."""
    made: list[tuple[int, ...]] = []
    for slot in range(int(draft.lengths[b])):
        parent = int(draft.parents[b, slot])
        made.append((*(made[parent] if parent != ROOT else ()), int(draft.tokens[b, slot])))
    return made


def test_a_greedy_tree_holds_the_likeliest_paths():
    context, known = asked(TEXT, GREEDY), paths(TEXT, 4)
    draft = HeadDrafter(unpacked(), branches=V).propose([context], [9], rng_of([context]))
    best = sorted((path for path in known if path), key=lambda path: -known[path])[:9]
    assert max(map(len, best)) == 3, "the paths must reach level 3, and none may be deeper than `paths` goes"
    assert lines(draft) == best
    assert draft.q is None


@pytest.mark.parametrize("slots", [4, 9, 30])
def test_a_greedy_tree_leaves_out_paths_below_the_confidence(slots):
    context, known, least = asked(TEXT, GREEDY), paths(TEXT, 4), 0.05
    draft = HeadDrafter(unpacked(), branches=V, confidence=least).propose([context], [slots], rng_of([context]))
    likely = sorted((path for path in known if path and known[path] >= least), key=lambda path: -known[path])
    assert 9 < len(likely) < 30
    assert max(map(len, likely)) < 4, "no path may be deeper than `paths` goes"
    assert lines(draft) == likely[:slots]


def test_a_greedy_tree_keeps_its_likeliest_token_however_unlikely():
    context = asked(TEXT, GREEDY)
    draft = HeadDrafter(unpacked(), branches=V, confidence=0.99).propose([context], [9], rng_of([context]))
    assert lines(draft) == lines(HeadDrafter(unpacked(), branches=V).propose([context], [1], rng_of([context])))


def test_a_node_is_scored_as_if_its_path_were_the_only_one():
    """Grow three levels of two nodes in two rows of different lengths, with crossing parents."""
    head, contexts = unpacked(), [asked(TEXT, GREEDY, 0), asked(TEXT[:7], GREEDY, 1)]
    reader = HeadReader(head)
    assert reader.receive(contexts, 16) == [True, True]
    level = Level(reader.catch_up(contexts, [True, True])[:, None], torch.zeros((2, 1, 0), dtype=torch.bool))
    tokens = torch.tensor([[[6, 1], [3, 5], [2, 0]], [[4, 7], [0, 2], [5, 5]]])
    parents = torch.tensor([[[0, 0], [1, 0], [1, 1]], [[0, 0], [0, 0], [1, 0]]])
    lines: list[list[list[int]]] = [[[]], [[]]]
    for d in range(3):
        level = level.next(tokens[:, d], parents[:, d], reader.branch)
        for b, context in enumerate(contexts):
            pairs = zip(parents[b, d].tolist(), tokens[b, d].tolist(), strict=True)
            lines[b] = [[*lines[b][parent], token] for parent, token in pairs]
            for node, line in enumerate(lines[b]):
                torch.testing.assert_close(head.logits(level.states)[b, node], logits(context.tokens, line))


def test_a_drawn_path_has_the_likeliest_others_beside_it():
    context = asked(TEXT, WARM)
    draft = HeadDrafter(unpacked(6), branches=3).propose([context], [8], rng_of([context]))
    assert draft.drawn[0].tolist() == [True, False, False] * 2 + [True, False]
    assert draft.parents[0].tolist() == [ROOT] * 3 + [0] * 3 + [3] * 2
    vocab = DraftVocab.of(torch.tensor(IDS[:6]), V)
    for start, path in ((0, []), (3, [0]), (6, [0, 3])):
        scores = logits(TEXT, draft.tokens[0, path].tolist(), 6)
        torch.testing.assert_close(
            draft.q.probs()[:, start], warp(scores[None, None], [WARM], vocab=vocab).probs()[:, 0]
        )
        first = int(draft.tokens[0, start])
        others = [IDS[r] for r in scores.argsort(descending=True).tolist() if IDS[r] != first]
        assert draft.tokens[0, start + 1 : start + 3].tolist() == others[: 2 if start < 6 else 1]


def test_trees_of_rows_together_are_their_trees_alone():
    contexts = [asked(TEXT, GREEDY, 0), asked(TEXT[:7], SamplingParams(), 1), asked(TEXT[:10], WARM, 2)]
    drafter = HeadDrafter(unpacked(), branches=2)
    draft = drafter.propose(contexts, [7, 3, 5], rng_of(contexts))
    for b, (context, most) in enumerate(zip(contexts, [7, 3, 5], strict=True)):
        alone = HeadDrafter(unpacked(), branches=2).propose([context], [most], rng_of([context]))
        assert lines(draft, b) == lines(alone)
        assert len(lines(alone)) == most


def test_a_tree_leaves_nothing_in_the_cache():
    context, drafter = asked(TEXT[:8], GREEDY), HeadDrafter(unpacked(), branches=3)
    drafter.propose([context], [7], rng_of([context]))
    context.tokens, context.target_outputs = list(TEXT), outputs(TEXT, 7)
    fresh = asked(TEXT, GREEDY)
    assert lines(drafter.propose([context], [7], rng_of([context]))) == lines(
        HeadDrafter(unpacked(), branches=3).propose([fresh], [7], rng_of([fresh]))
    )


def test_more_branches_than_tokens_are_refused():
    with pytest.raises(ValueError, match="knows only 3 tokens"):
        HeadDrafter(unpacked(3), branches=4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("branches", [1, 2])
def test_on_a_gpu_the_drafts_are_those_of_the_cpu(branches):
    on_gpu = FittedHead.on(trained(), torch.tensor(IDS[:6]), copy.deepcopy(llama()).cuda())
    contexts = [asked(TEXT, GREEDY, 0), asked(TEXT[:7], WARM, 1), asked(TEXT[:9], SamplingParams(), 2)]
    rng = rng_of(contexts)
    expected = HeadDrafter(unpacked(6), branches=branches).propose(contexts, [4, 5, 3], rng)
    for context in contexts:
        context.target_outputs = TargetOutputs(
            context.target_outputs.stop, None, tuple(tap.cuda() for tap in context.target_outputs.hidden)
        )
    draft = HeadDrafter(on_gpu, branches=branches).propose(
        contexts, [4, 5, 3], Philox(rng.seeds.cuda(), rng.starts.cuda())
    )
    # a tree on a GPU is padded to its largest width: asking how wide it became would be a sync
    K = expected.tokens.shape[1]
    assert draft.tokens[:, :K].tolist() == expected.tokens.tolist()
    assert bool((draft.tokens[:, K:] == PAD).all())
    if branches == 1:
        real = torch.arange(K) < expected.lengths[:, None]
        torch.testing.assert_close(draft.q.probs().cpu()[real], expected.q.probs()[real], atol=1e-4, rtol=1e-3)
