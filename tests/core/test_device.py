"""Copies between CPU and device keep their values, and sync only when a copy is read."""

import pytest
import torch

from draftproof.core.device import AsyncCopy, current_device, is_cpu, to_device

CPU = torch.device("cpu")


def test_a_round_trip_returns_the_same_numbers():
    sent = to_device([[1, -(2**62)], [3, 4]], CPU)
    assert sent.dtype == torch.long
    assert AsyncCopy(sent).read().tolist() == [[1, -(2**62)], [3, 4]]
    assert to_device([0.5], CPU, torch.float64).tolist() == [0.5]
    assert to_device([], CPU).shape == (0,)


def test_only_the_cpu_is_read_without_a_sync():
    assert is_cpu(CPU)
    assert not is_cpu(torch.device("cuda"))


def test_numpy_refuses_a_tensor_on_another_device():
    """This is why reading through numpy is never a hidden sync."""
    with pytest.raises((TypeError, RuntimeError)):
        torch.ones(2, device="meta").numpy()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_from_a_gpu_syncs_only_when_it_is_read():
    torch.cuda.set_sync_debug_mode("error")
    try:
        copies = [AsyncCopy(to_device([n], torch.device("cuda")) * 2) for n in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [int(copy.read()[0]) for copy in copies] == [2 * n for n in range(50)]


def test_current_device_does_nothing_for_a_cpu():
    with current_device(CPU):
        assert to_device([1], CPU).tolist() == [1]
