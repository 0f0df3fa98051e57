"""Randomness as data: a verifier is a pure function of its arguments, and noise is one of them.

Noise is a key and not numbers: nothing is drawn until asked for, and asking twice gives the same. The generator is
Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a function from a counter to
four 32-bit words, so that any number can be had on any device without those before it.
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
Words = npt.NDArray[np.uint32]


class Purpose(IntEnum):
    """What a number is for. Two sites never share numbers: a number used twice is a bias."""

    DRAFT = 0  # the drafter draws its j-th token
    ACCEPT = 1  # the coin for the j-th draft token
    CLOSE = 2  # where the closing token falls; lane: the trial
    THIN = 3  # whether a trial for the closing token stands; lane: the trial
    POSITION = 4  # the race for the token at an absolute position: only what `coupled` and plain decoding draw


@dataclass(frozen=True, slots=True)
class Philox:
    """The randomness of one round: `seeds` of the requests, `starts` of the round.

    A number is addressed by (seed, start, site, j, lane) and has 53 bits: with 24 the tail of a large vocabulary is out
    of reach. `starts` is the index of the first token the round emits, prompt counted. A round emits at least one
    token, so (seed, start) never repeats; a row's numbers do not depend on its neighbours. Token positions alone would
    not do as an address: block verification looks at coins behind the last token it keeps, and the next round would
    throw them again.
    """

    seeds: Int[Tensor, " B"]
    starts: Int[Tensor, " B"]
    shared: bool = False
    """Handed to a drafter under `coupled`: it is to draw with the target's own noise (`core.draw.propose`)."""

    def take(self, rows: Int[Tensor, " N"]) -> "Philox":
        return Philox(self.seeds[rows], self.starts[rows], self.shared)

    def shifted(self, by: int) -> "Philox":
        """The noise `by` tokens further on. Only POSITION noise may be asked for there."""
        return Philox(self.seeds, self.starts + by, self.shared)

    def coins(self, K: int) -> Float[Tensor, "B K"]:
        """The acceptance coins: uniform on [0, 1)."""
        return self.uniform(Purpose.ACCEPT, torch.arange(K, device=self.seeds.device))

    def uniform(self, purpose: Purpose, lanes: Tensor, j: int = 0) -> Float[Tensor, "B N"]:
        """One number a lane, uniform on [0, 1), 53 bits. `lanes`: [N], or [B, N] where they differ by row."""
        return self.pairs(purpose, lanes, j)[0]

    def pair(self, purpose: Purpose, lanes: Tensor, j: int = 0) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
        """Two numbers a lane: a draw in two steps wants 53 bits for each."""
        first, second = self.pairs(purpose, lanes, j)
        return first, second

    def exponential(self, purpose: Purpose, lanes: Tensor, j: int = 0) -> Float[Tensor, "B N"]:
        """One number a lane, Exp(1), never 0: a clock at 0 would win any race, whatever its rate."""
        return -torch.log1p(-(self.uniform(purpose, lanes, j) + 2.0**-54))

    def pairs(self, purpose: Purpose | Tensor, lanes: Tensor, j: int | Tensor = 0) -> Float[Tensor, "2 B N"]:
        """Both numbers of each counter (lane, j, start, site); one site and one j, or one for each lane."""
        shape = (4, len(self.seeds), lanes.shape[-1])
        if lanes.device.type != "cpu":
            counter = torch.empty(shape, dtype=torch.int64, device=lanes.device)
            counter[0], counter[1], counter[2], counter[3] = lanes, j, self.starts[:, None], purpose
            words = philox(counter, torch.stack([self.seeds, self.seeds >> 32])[..., None] & MASK)
            return ((words[0::2] >> 5) * 2**26 + (words[1::2] >> 6)).double() * 2.0**-53
        # numpy's small operations cost a quarter of torch's, and a round needs a few numbers only
        array = np.empty(shape, dtype=np.uint32)
        array[0], array[2] = lanes.numpy(), self.starts.numpy()[:, None]
        array[1] = j.numpy() if isinstance(j, Tensor) else j
        array[3] = purpose.numpy() if isinstance(purpose, Tensor) else purpose
        seeds = self.seeds.numpy()[:, None]
        even, odd = philox_numpy(array, np.stack([seeds, seeds >> 32]).astype(np.uint32))
        return torch.from_numpy(((even >> 5) * 2.0**26 + (odd >> 6)) * 2.0**-53)


_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64).reshape(2, 1, 1)
_WEYL = (np.arange(10, dtype=np.uint64)[:, None] * np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)).reshape(
    10, 2, 1, 1
)


def philox_numpy(counter: Words, key: Words) -> tuple[Words, Words]:
    """Ten rounds: counter [4, B, N] and key [2, B, 1] to words 0 and 2, [2, B, N], and words 1 and 3; all uint32.

    The two halves of the state go through the same steps, so they travel as one array. A 64-bit product is read as two
    32-bit words where it lies.
    """
    even, odd = counter[0::2], counter[1::2]
    for k in (key + _WEYL).astype(np.uint32):
        product = (even * _MULTIPLIERS).view(np.uint32)[::-1]
        even, odd = product[..., 1::2] ^ odd ^ k, product[..., 0::2]
    return even, odd


def philox(counter: Int[Tensor, "4 B N"], key: Int[Tensor, "2 B 1"]) -> Int[Tensor, "4 B N"]:
    """The same on 32-bit words held in int64, on any device, in order.

    The products wrap around like unsigned ones: only their low 64 bits are looked at, and the mask takes the sign off.
    """
    multipliers, weyl = _constants(counter.device)
    even, odd = counter[0::2], counter[1::2]
    for k in (key + weyl) & MASK:
        product = (even * multipliers).flip(0)
        even, odd = ((product >> 32) & MASK) ^ odd ^ k, product & MASK
    return torch.stack([even, odd], 1).flatten(0, 1)


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Multipliers and key steps, sent to a device once: to send is to wait."""
    multipliers, weyl = (torch.from_numpy(c.astype(np.int64)).to(device) for c in (_MULTIPLIERS, _WEYL))
    return multipliers, weyl
