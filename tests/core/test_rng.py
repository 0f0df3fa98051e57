"""Random numbers match the published Philox vectors, and no two addresses share one."""

import numpy as np
import pytest
import torch

from draftproof.core import rng as rng_module
from draftproof.core.rng import Philox, Purpose, philox, philox_numpy, philox_words

F = 0xFFFFFFFF
# Random123's kat_vectors for philox4x32-10: counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((F, F, F, F), (F, F), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_philox_gives_the_published_vectors(counter, key, result):
    words = philox(torch.tensor(counter).view(4, 1, 1), torch.tensor(key).view(2, 1, 1))
    assert tuple(words.flatten().tolist()) == result
    even, odd = philox_numpy(*(np.array(part, dtype=np.uint32).reshape(-1, 1, 1) for part in (counter, key)))
    assert (int(even[0, 0, 0]), int(odd[0, 0, 0]), int(even[1, 0, 0]), int(odd[1, 0, 0])) == result
    assert philox_words(counter, key) == result


def some_rng(n=3):
    return Philox(torch.arange(n) * 7919 - 5, torch.arange(n) * 3)


def test_torch_and_numpy_give_the_same_numbers():
    rng, lanes = some_rng(), torch.arange(9)
    counter = torch.empty(4, 3, 9, dtype=torch.long)
    counter[0], counter[1], counter[2], counter[3] = lanes, 2, rng.starts[:, None], int(Purpose.CLOSE)
    words = philox(counter, torch.stack([rng.seeds & F, (rng.seeds >> 32) & F])[..., None])
    first = ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53
    second = ((words[2] >> 5) * 2**26 + (words[3] >> 6)).double() * 2.0**-53
    here = rng.pair(Purpose.CLOSE, lanes, 2)
    assert torch.equal(here[0], first)
    assert torch.equal(here[1], second)


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 2**62 + 2**31])
def test_few_numbers_are_those_of_many(seed, monkeypatch):
    """Few are computed by whole numbers of Python, many by numpy."""
    rng, lanes = Philox(torch.tensor([seed, 5]), torch.tensor([2**31 + 3, 0])), torch.tensor([0, 1, 2**32 - 1])
    for j in (0, 7, torch.tensor([3, 0, 2**31])):
        few = rng.pairs(Purpose.THIN, lanes, j)
        with monkeypatch.context() as patch:
            patch.setattr(rng_module, "FEW_COUNTERS", 0)
            many = rng.pairs(Purpose.THIN, lanes, j)
        assert torch.equal(few, many)


def test_several_j_in_one_call_equal_one_call_each():
    rng, each = some_rng(), torch.tensor([4, 0, 9])
    together = rng.pairs(Purpose.DRAFT, torch.zeros(3, dtype=torch.long), each)
    for n, j in enumerate(each.tolist()):
        alone = rng.pairs(Purpose.DRAFT, torch.zeros(1, dtype=torch.long), j)
        assert torch.equal(together[..., n : n + 1], alone)


def test_a_row_does_not_depend_on_its_neighbours():
    many, alone = some_rng(), some_rng().take(torch.tensor([1]))
    assert torch.equal(many.coins(4)[1:2], alone.coins(4))


def test_no_two_addresses_share_a_number():
    seen = []
    for start in (5, 6):
        rng = Philox(torch.tensor([1, 2, 2**40]), torch.full((3,), start))
        for purpose in Purpose:
            for j in (0, 1):
                seen.append(rng.uniform(purpose, torch.arange(50), j).flatten())
    numbers = torch.cat(seen)
    assert len(numbers.unique()) == len(numbers)


def test_uniforms_have_53_bits_and_lie_below_one():
    u = Philox(torch.tensor([3]), torch.tensor([0])).uniform(Purpose.CLOSE, torch.arange(200_000))[0]
    assert u.min() >= 0
    assert u.max() < 1
    assert ((u * 2**53) % 1 == 0).all()
    assert ((u * 2**52) % 1 != 0).any()  # the last bit is used
    assert abs(u.mean() - 0.5) < 5 / (12 * 200_000) ** 0.5


def test_exponentials_are_positive_and_have_mean_one():
    e = Philox(torch.tensor([3]), torch.tensor([0])).exponential(Purpose.POSITION, torch.arange(200_000))[0]
    assert e.min() > 0
    assert abs(e.mean() - 1) < 5 / 200_000**0.5
