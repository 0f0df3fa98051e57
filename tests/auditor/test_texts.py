"""What a bet may know about a token, compared with a plain search."""

import pytest
import torch

from draftproof.auditor.texts import LONGEST_MATCH, Positions, Text, depths
from draftproof.core.types import PAD, Round


def continuation(before):
    """Return the token after the latest longest match, by brute force."""
    for size in range(min(LONGEST_MATCH, len(before) - 1), 0, -1):
        for start in range(len(before) - size - 1, -1, -1):
            if before[start : start + size] == before[-size:]:
                return before[start + size]
    return PAD


@pytest.fixture(scope="module")
def texts():
    numbers = torch.Generator().manual_seed(0)

    def some(n):
        return tuple(torch.randint(4, (n,), generator=numbers).tolist())

    return [Text(some(a), some(b)) for a, b in torch.randint(1, 12, (60, 2), generator=numbers).tolist()]


def test_every_token_and_what_came_before_it(texts):
    positions = Positions.of(texts)
    wanted = [([*t.prompt, *t.tokens[:i]], t.tokens[i], i) for t in texts for i in range(len(t.tokens))]
    assert len(positions) == len(wanted)
    for n, (before, token, index) in enumerate(wanted):
        assert positions.before[n, : positions.length[n]].tolist() == before
        assert set(positions.before[n, positions.length[n] :].tolist()) <= {PAD}
        assert (int(positions.token[n]), int(positions.output_index[n])) == (token, index)
        assert int(positions.last[n]) == before[-1]
        assert positions.before[n][positions.in_output[n]].tolist() == before[len(before) - index :]
        assert int(positions.continuation[n]) == continuation(before)


def test_depths_count_from_the_borders_of_rounds_and_no_further():
    text = Text((0,), (1, 2, 3, 4, 5), (Round(3, 2), Round(3, 0), Round(3, 3)))
    assert list(depths(text)) == [0, 1, 2, 0, 0]
    assert list(depths(Text((0,), (1, 2)))) == [PAD, PAD]


def test_late_positions_have_not_seen_the_last_tokens():
    positions = Positions.of([Text((9, 8), (1, 2, 3))])
    late = positions.late(torch.tensor([0, 1, 1]))
    assert late.before[2, : late.length[2]].tolist() == [9, 8, 1]
    assert late.output_index.tolist() == [0, 0, 1]
    assert torch.equal(late.token, positions.token)
