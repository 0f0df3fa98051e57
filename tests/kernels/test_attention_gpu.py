"""Test decode attention on a GPU at full size: equality with the reference, graphs, determinism."""

import pytest

from kernels import attention_claims

pytestmark = pytest.mark.gpu


def test_a_million_rows_give_the_reference_attention():
    assert attention_claims.many_rows()["rows"] >= 1_000_000


def test_long_rows_and_many_rows_give_the_reference_attention():
    attention_claims.long_rows()


def test_a_graph_follows_the_lengths():
    attention_claims.graph_replay()


def test_the_attention_of_a_row_is_always_the_same():
    attention_claims.determinism()
