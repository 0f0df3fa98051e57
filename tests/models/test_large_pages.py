"""Weights lie side by side, in chunks that are freed with the last of their tensors."""

import gc
import mmap
import weakref

import pytest
import torch

from draftproof.models import large_pages
from draftproof.models.large_pages import ALIGNED, CHUNK, PAGE, LargePages


def test_tensors_lie_side_by_side_and_keep_what_is_written():
    pages = LargePages()
    first, second = pages.empty((3, 5), torch.float32), pages.empty((7,), torch.bfloat16)
    assert first.data_ptr() % PAGE == 0 or not hasattr(mmap, "MADV_HUGEPAGE")
    assert second.data_ptr() == first.data_ptr() + ALIGNED
    first.fill_(1.5)
    second.fill_(2.5)
    assert first.tolist() == [[1.5] * 5] * 3
    assert second.tolist() == [2.5] * 7


def test_a_tensor_that_does_not_fit_begins_a_chunk_of_its_own():
    pages = LargePages()
    small, large = pages.empty((10,), torch.uint8), pages.empty((CHUNK + 1,), torch.uint8)
    large[-1] = 7
    assert large.data_ptr() >= small.data_ptr() + CHUNK or large.data_ptr() + CHUNK < small.data_ptr()
    assert int(large[-1]) == 7


@pytest.mark.parametrize("has_them", [True, False])
def test_memory_is_freed_with_the_last_tensor(has_them, monkeypatch):
    if not has_them:
        monkeypatch.delattr(large_pages.mmap, "MADV_HUGEPAGE", raising=False)
    pages = LargePages()
    one, other = pages.empty((4,), torch.uint8), pages.empty((4,), torch.uint8)
    storage = weakref.ref(pages._chunk)
    del pages, one
    other.fill_(3)
    assert other.tolist() == [3] * 4
    gc.collect()
    assert storage() is None
