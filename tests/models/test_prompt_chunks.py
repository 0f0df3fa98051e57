"""Chunks of prompts: borders of positions alone, and about equal times to read."""

from itertools import pairwise

import pytest

from draftproof.models.extents import PAGE
from draftproof.models.prompt_chunks import ATTENTION_DOUBLES, STEP, STEPS_AT_START, chunk_around, chunk_size


def borders(stop):
    found = [0]
    while found[-1] < stop:
        found.append(chunk_around(found[-1])[1])
    return found


@pytest.mark.parametrize("first", [20_000, 5])
def test_every_position_of_a_chunk_has_its_borders(first):
    chunk_around(first)  # whatever was asked for before
    cuts = borders(9000)
    for start, end in pairwise(cuts):
        assert {chunk_around(position) for position in (start, (start + end) // 2, end - 1)} == {(start, end)}


def test_short_prompts_are_cut_into_pages():
    assert borders(5 * PAGE) == [0, 64, 128, 192, 256, 320]


def test_chunks_become_smaller_and_take_about_equally_long():
    sizes = [chunk_size(start) for start in borders(6000)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size % STEP == 0 and size >= STEP for size in sizes)
    times = [chunk_size(start) * (1 + start / ATTENTION_DOUBLES) for start in borders(5000) if chunk_size(start) < PAGE]
    assert len(times) > 80
    assert 0.85 * STEP * STEPS_AT_START < min(times) < max(times) < 1.15 * STEP * STEPS_AT_START
