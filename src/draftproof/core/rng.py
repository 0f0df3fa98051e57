"""Random numbers by address: a counter-based generator, so that verification is a pure function of its arguments.

`Philox` holds a key and no numbers: the same address gives the same number every time. The generator is Philox 4x32-10
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a function from a counter to four 32-bit words, so
any number can be computed on any device without those before it.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

MASK = 0xFFFFFFFF
"""The low 32 bits of an int64."""

FEW_COUNTERS = 8
"""Counters up to which Python's whole numbers are faster than numpy: 10 µs and 5 for each, beside 50 to 60 for any."""

Words = npt.NDArray[np.uint32]


class Purpose(IntEnum):
    """The use of a random number. Two purposes never share numbers: a number used twice is a bias."""

    DRAFT = 0  # draw the drafter's j-th token
    ACCEPT = 1  # accept or reject a draft token; lane: its index
    CLOSE = 2  # draw the residual or bonus token; lane: the trial of `rules.token.thin`
    THIN = 3  # accept or reject a trial of `rules.token.thin`; lane: the trial
    POSITION = 4  # race for the token at an absolute position; used by `coupled` and plain decoding only


@dataclass(frozen=True, slots=True)
class Philox:
    """The random numbers of one round: one seed and one start for each row.

    A number is addressed by (seed, start, purpose, j, lane) and has 53 bits: with 24 the tail of a large vocabulary is
    out of reach. `starts` is the index of the first token the round emits, prompt counted. A round emits at least one
    token, so (seed, start) never repeats; a row's numbers do not depend on its neighbours. Token positions alone are
    not a sufficient address: block verification uses coins after the last token it keeps, and the next round would use
    them again.
    """

    seeds: Int[Tensor, " B"]
    starts: Int[Tensor, " B"]
    shared: bool = False
    """True if a drafter is to draw with the target's own random numbers, as `coupled` needs
    (`core.distribution.propose`)."""

    def take(self, rows: Int[Tensor, " N"]) -> "Philox":
        """Return the random numbers of these rows."""
        return Philox(self.seeds[rows], self.starts[rows], self.shared)

    def shifted(self, by: int) -> "Philox":
        """Return the random numbers `by` tokens further on. Valid for Purpose.POSITION only: others would repeat."""
        return Philox(self.seeds, self.starts + by, self.shared)

    def coins(self, K: int) -> Float[Tensor, "B K"]:
        """Return the acceptance coins of K draft tokens, uniform on [0, 1)."""
        return self.uniform(Purpose.ACCEPT, torch.arange(K, device=self.seeds.device))

    def uniform(self, purpose: Purpose, lanes: Tensor, j: int = 0) -> Float[Tensor, "B N"]:
        """Return one number for each lane, uniform on [0, 1), 53 bits. `lanes`: [N], or [B, N] if rows differ."""
        return self.pairs(purpose, lanes, j)[0]

    def pair(self, purpose: Purpose, lanes: Tensor, j: int = 0) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
        """Return two numbers for each lane: a draw in two steps needs 53 bits for each."""
        first, second = self.pairs(purpose, lanes, j)
        return first, second

    def exponential(self, purpose: Purpose, lanes: Tensor, j: int = 0) -> Float[Tensor, "B N"]:
        """Return one number for each lane, Exp(1), never 0: a clock at 0 would win any race, whatever its rate."""
        return -torch.log1p(-(self.uniform(purpose, lanes, j) + 2.0**-54))

    def pairs(self, purpose: Purpose | Tensor, lanes: Tensor, j: int | Tensor = 0) -> Float[Tensor, "2 B N"]:
        """Return both numbers of each counter (lane, j, start, purpose); `purpose` and `j` may differ by lane."""
        shape = (4, len(self.seeds), lanes.shape[-1])
        if lanes.device.type != "cpu":
            counter = torch.empty(shape, dtype=torch.int64, device=lanes.device)
            counter[0], counter[1], counter[2], counter[3] = lanes, j, self.starts[:, None], purpose
            words = philox(counter, torch.stack([self.seeds, self.seeds >> 32])[..., None] & MASK)
            return ((words[0::2] >> 5) * 2**26 + (words[1::2] >> 6)).double() * 2.0**-53
        if len(self.seeds) * lanes.shape[-1] <= FEW_COUNTERS and lanes.ndim == 1 and not isinstance(purpose, Tensor):
            return self._few_pairs(int(purpose), lanes, j)
        # Small operations cost a quarter as much in numpy as in torch, and a round needs few numbers.
        array = np.empty(shape, dtype=np.uint32)
        array[0], array[2] = lanes.numpy(), self.starts.numpy()[:, None]
        array[1] = j.numpy() if isinstance(j, Tensor) else j
        array[3] = purpose.numpy() if isinstance(purpose, Tensor) else purpose
        seeds = self.seeds.numpy()[:, None]
        even, odd = philox_numpy(array, np.stack([seeds, seeds >> 32]).astype(np.uint32))
        return torch.from_numpy(((even >> 5) * 2.0**26 + (odd >> 6)) * 2.0**-53)

    def _few_pairs(self, purpose: int, lanes: Int[Tensor, " N"], j: int | Tensor) -> Float[Tensor, "2 B N"]:
        """Return `pairs` on a CPU by whole numbers of Python: a call of numpy costs as much as two of their rounds."""
        steps = [j] * len(lanes) if isinstance(j, int) else j.expand(len(lanes)).numpy().tolist()
        numbers, seeds, starts = (tensor.numpy().tolist() for tensor in (lanes, self.seeds, self.starts))
        words = [
            [philox_words((lane & MASK, step & MASK, start & MASK, purpose), (seed & MASK, seed >> 32 & MASK))
             for lane, step in zip(numbers, steps, strict=True)]
            for seed, start in zip(seeds, starts, strict=True)
        ]  # fmt: skip
        return torch.tensor(
            [[[((w[i] >> 5) * 2**26 + (w[i + 1] >> 6)) * 2.0**-53 for w in row] for row in words] for i in (0, 2)],
            dtype=torch.float64,
        )


_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64).reshape(2, 1, 1)
_WEYL = (np.arange(10, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)).reshape(
    10, 2, 1, 1
)


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Apply Philox's ten rounds to one counter, in whole numbers of Python."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (second >> 32) ^ b ^ low, second & MASK, (first >> 32) ^ d ^ high, first & MASK
        low, high = (low + 0x9E3779B9) & MASK, (high + 0xBB67AE85) & MASK
    return a, b, c, d


def philox_numpy(counter: Words, key: Words) -> tuple[Words, Words]:
    """Apply Philox's ten rounds to counter [4, B, N] and key [2, B, 1]; return words (0, 2) and (1, 3), [2, B, N] each.

    All arrays are uint32. Both halves of the state go through the same steps, so they are one array. A 64-bit product
    is viewed as two 32-bit words, without a copy.
    """
    even, odd = counter[0::2], counter[1::2]
    for k in (key + _WEYL).astype(np.uint32):
        product = (even * _MULTIPLIERS).view(np.uint32)[::-1]
        even, odd = product[..., 1::2] ^ odd ^ k, product[..., 0::2]
    return even, odd


def philox(counter: Int[Tensor, "4 B N"], key: Int[Tensor, "2 B 1"]) -> Int[Tensor, "4 B N"]:
    """Apply Philox's ten rounds to 32-bit words held in int64, on any device; return the four words in order.

    Products wrap around like unsigned ones: only their low 64 bits are used, and the mask removes the sign.
    """
    multipliers, weyl = _constants(counter.device)
    even, odd = counter[0::2], counter[1::2]
    for k in (key + weyl) & MASK:
        product = (even * multipliers).flip(0)
        even, odd = ((product >> 32) & MASK) ^ odd ^ k, product & MASK
    return torch.stack([even, odd], 1).flatten(0, 1)


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return multipliers and key steps on a device. Cached, because each copy to the device is a sync."""
    multipliers, weyl = (torch.from_numpy(c.astype(np.int64)).to(device) for c in (_MULTIPLIERS, _WEYL))
    return multipliers, weyl
