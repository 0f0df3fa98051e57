"""A small soak test; `make soak` runs the long ones. Its checks can fail."""

import asyncio

import pytest

from serve.running import load, serving
from serve.soak import Record, check, check_memory, check_nonces, put_under_load

REQUESTS = 300


def test_mixed_requests_leave_nothing_behind_and_every_text_is_the_librarys(folder, tmp_path):
    with serving(load(folder, max_batch=8, kv_memory=2_000_000), max_body=100_000) as server:
        result = asyncio.run(put_under_load(server.url, REQUESTS, tmp_path / "records", seed=0, max_tokens=8))
        check(result, server, load(folder), REQUESTS)
    completed = sum(record.texts is not None for record in result.records())
    assert completed > REQUESTS / 2


def test_a_foreign_nonce_is_found():
    with pytest.raises(AssertionError):
        check_nonces(Record("plain", {}, "nonce1x", ["the fox nonce2x"]), {"nonce1x", "nonce2x"})
    check_nonces(Record("echo", {}, "nonce1x", ["nonce1x the fox nonce3x"]), {"nonce1x", "nonce2x"})


def test_growing_memory_is_found():
    with pytest.raises(AssertionError, match="grew by"):
        check_memory([100 + i for i in range(1000)])
    assert check_memory([100] * 1000) == 0
