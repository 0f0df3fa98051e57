"""Numbers go to the device and come back as they were; what lies on the host costs no wait to look at."""

import pytest
import torch

from draftproof.core.device import AsyncCopy, current_device, is_cpu, to_device

CPU = torch.device("cpu")


def test_what_is_sent_comes_back():
    sent = to_device([[1, -(2**62)], [3, 4]], CPU)
    assert sent.dtype == torch.long
    assert AsyncCopy(sent).read().tolist() == [[1, -(2**62)], [3, 4]]
    assert to_device([0.5], CPU, torch.float64).tolist() == [0.5]
    assert to_device([], CPU).shape == (0,)


def test_only_the_host_is_the_host():
    assert is_cpu(CPU)
    assert not is_cpu(torch.device("cuda"))


def test_numbers_elsewhere_cannot_be_looked_at_through_numpy():
    """Why a look through numpy is never a wait."""
    with pytest.raises((TypeError, RuntimeError)):
        torch.ones(2, device="meta").numpy()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_waited_for_only_by_who_reads():
    torch.cuda.set_sync_debug_mode("error")
    try:
        fetches = [AsyncCopy(to_device([n], torch.device("cuda")) * 2) for n in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [int(fetch.read()[0]) for fetch in fetches] == [2 * n for n in range(50)]


def test_the_host_is_no_device_to_be_on():
    with current_device(CPU):
        assert to_device([1], CPU).tolist() == [1]
