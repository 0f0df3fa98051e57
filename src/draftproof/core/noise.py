"""Randomness as data: a verifier is a pure function of its arguments, and noise is one of them.

Noise is a key and not numbers: nothing is drawn until asked for, and asking twice gives the same. The generator is
Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a function from a counter to
four 32-bit words, so that any number can be had on any device without those before it.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

MASK = 0xFFFFFFFF


class Site(IntEnum):
    """What a number is for. Two sites never share numbers: a number used twice is a bias."""

    DRAFT = 0  # the drafter draws its j-th token
    ACCEPT = 1  # the coin for the j-th draft token
    CLOSE = 2  # where the closing token falls; lane: the trial
    THIN = 3  # whether a trial for the closing token stands; lane: the trial
    POSITION = 4  # the race for the token at an absolute position: only what `coupled` and plain decoding draw


@dataclass(frozen=True, slots=True)
class Noise:
    """The randomness of one round: `seeds` of the requests, `starts` of the round.

    A number is addressed by (seed, start, site, j, lane). `starts` is the index of the first token the round emits,
    prompt counted. A round emits at least one token, so (seed, start) never repeats; a row's numbers do not depend
    on its neighbours. Token positions alone would not do as an address: block verification looks at coins behind
    the last token it keeps, and the next round would throw them again.
    """

    seeds: Int[Tensor, " B"]
    starts: Int[Tensor, " B"]
    shared: bool = False
    """Handed to a drafter under `coupled`: it is to draw with the target's own noise (`core.race.propose`)."""

    def take(self, rows: Int[Tensor, " N"]) -> "Noise":
        return Noise(self.seeds[rows], self.starts[rows], self.shared)

    def shifted(self, by: int) -> "Noise":
        """The noise `by` tokens further on. Only POSITION noise may be asked for there."""
        return Noise(self.seeds, self.starts + by, self.shared)

    def coins(self, K: int) -> Float[Tensor, "B K"]:
        """The acceptance coins: uniform on [0, 1)."""
        return self.uniform(Site.ACCEPT, torch.arange(K, device=self.seeds.device))

    def uniform(self, site: Site, lanes: Tensor, j: int = 0) -> Float[Tensor, "B N"]:
        """One number a lane, uniform on [0, 1), 53 bits. `lanes`: [N], or [B, N] where they differ by row."""
        a, b, _, _ = self.words(site, lanes, j)
        return unit(a, b)

    def pair(self, site: Site, lanes: Tensor, j: int = 0) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
        """Two numbers a lane: a draw in two steps wants 53 bits for each."""
        a, b, c, d = self.words(site, lanes, j)
        return unit(a, b), unit(c, d)

    def exponential(self, site: Site, lanes: Tensor, j: int = 0) -> Float[Tensor, "B N"]:
        """One number a lane, Exp(1), never 0: a clock at 0 would win any race, whatever its rate."""
        return -torch.log1p(-(self.uniform(site, lanes, j) + 2.0**-54))

    def words(self, site: Site, lanes: Tensor, j: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four 32-bit words at counter (lane, j, start, site), as int64 [B, N]."""
        if lanes.device.type != "cpu":
            counter = torch.empty((4, len(self.seeds), lanes.shape[-1]), dtype=torch.int64, device=lanes.device)
            counter[0], counter[1], counter[2], counter[3] = lanes, j, self.starts[:, None], int(site)
            return philox(counter, torch.stack([self.seeds & MASK, (self.seeds >> 32) & MASK])[..., None])
        # numpy's small operations cost a quarter of torch's, and a round needs a few numbers only
        array = np.empty((4, len(self.seeds), lanes.shape[-1]), dtype=np.int64)
        array[0], array[1], array[2], array[3] = lanes.numpy(), j, self.starts.numpy()[:, None], int(site)
        seeds = self.seeds.numpy()[:, None]
        a, b, c, d = philox(array, np.stack([seeds & MASK, (seeds >> 32) & MASK]))
        return torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(c), torch.from_numpy(d)


def unit(high: Tensor, low: Tensor) -> Tensor:
    """53 of 64 bits as a float64 in [0, 1): with 24 bits the tail of a large vocabulary is out of reach."""
    return ((high >> 5) * 2**26 + (low >> 6)).double() * 2.0**-53


def philox(counter: Any, key: Any) -> tuple[Any, Any, Any, Any]:
    """Ten rounds on 32-bit words held in int64: counter [4, B, N] and key [2, B, 1], both numpy or both torch.

    The two halves of the state go through the same steps, so they travel as one array. The products wrap around
    like unsigned ones: only their low 64 bits are looked at, and the mask takes the sign back off.
    """
    even, odd = counter[0::2], counter[1::2]
    multipliers: Any = _MULTIPLIERS
    weyl: Any = _WEYL
    if isinstance(counter, Tensor):
        multipliers, weyl = (torch.from_numpy(c).to(counter.device) for c in (multipliers, weyl))
    for k in (key + weyl) & MASK:
        product = even * multipliers
        even, odd = _swap((product >> 32) & MASK) ^ odd ^ k, _swap(product & MASK)
    return even[0], odd[0], even[1], odd[1]


_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57]).reshape(2, 1, 1)
_WEYL = (np.arange(10)[:, None] * np.array([0x9E3779B9, 0xBB67AE85])).reshape(10, 2, 1, 1)


def _swap(halves: Any) -> Any:
    return halves[::-1] if isinstance(halves, np.ndarray) else halves.flip(0)
