"""Mutants of the random numbers: too few bits, so that rare tokens cannot win an exponential race."""

from copy import deepcopy
from functools import cache

import torch
import transformers as tf

from auditor.mutants.mutant import mutant
from auditor.mutants.world import World
from draftproof.core.distribution import Distribution
from draftproof.core.rng import Philox
from draftproof.core.sampling import SamplingParams
from draftproof.core.tree import real
from draftproof.core.types import Draft, Verdict
from draftproof.engine.engine import Engine
from draftproof.models.hf import HFModel
from draftproof.rules import Verifier
from draftproof.rules.chain import verdict
from draftproof.rules.token import leading

HEAD, TAIL = 64, 2**16
"""Numbers of likely tokens, and of tokens each less likely than 2^-24 though together they are not rare."""


def race_of(bits: int) -> Verifier:
    """Return a rule that emits the target's own draw and accepts drafts equal to it: exact, but for the bits."""

    def verify(p: Distribution, draft: Draft, rng: Philox) -> Verdict:
        dists = p.probs()
        # torch's generator, as Philox would take minutes for clocks of a whole vocabulary
        numbers = torch.Generator().manual_seed(int(rng.seeds.sum()) * 1_000_003 + int(rng.starts.sum()))
        coarse = (torch.rand(dists.shape, generator=numbers) * 2**bits).floor() / 2**bits
        clocks = (-torch.log1p(-coarse)).clamp_min(2.0**-bits)  # a clock at 0 would win whatever its speed
        drawn = (dists / clocks).argmax(-1)
        accepted = leading((drawn[:, :-1] == draft.tokens) & real(draft))
        return verdict(draft, accepted, drawn.gather(1, accepted[:, None])[:, 0])

    return verify


@mutant("randomness", sampling=SamplingParams(temperature=0.6), budget=40_000)
def eight_bit_noise(world: World) -> Engine:
    """A race on random numbers of eight bits, as bfloat16 has: tokens less likely than 1/256 hardly ever win."""
    return world.engine(rule=race_of(8))


@cache
def long_tailed() -> tf.GPT2LMHeadModel:
    """Return a model with a large vocabulary, all but HEAD tokens of it at about 3e-8 each and 2e-3 together."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256, "vocab_size": HEAD + TAIL}
    ends = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, **ends, initializer_range=0.3)).eval()
        norm, head = model.transformer.ln_f, model.lm_head.weight
        norm.weight[-1], norm.bias[-1] = 0.0, 1.0  # a feature that is always 1: the tail's scores do not depend on it
        head[:, -1] = 0.0
        head[HEAD:] = 0.0
        scores = model(torch.randint(HEAD, (50, 8))).logits[..., :HEAD]
        head[:HEAD] *= 1.5 / scores.std()
        typical = deepcopy(model)(torch.randint(HEAD, (50, 8))).logits[..., :HEAD].logsumexp(-1).mean()
        head[HEAD:, -1] = typical + torch.tensor(3e-8).log()
    return model


class LongTailed(World):
    """The world of the long-tailed model."""

    @property
    def hf(self) -> tf.GPT2LMHeadModel:
        return long_tailed()

    @property
    def target(self) -> HFModel:
        return HFModel(long_tailed())


@mutant(
    "randomness",
    drafts="lookup",
    budget=None,
    because="the tail has 2e-3 of the mass, and the audit ends when 0.02 would have been seen: ask for bias=0.002",
    world=LongTailed(),
)
def noise_of_24_bits(world: World) -> Engine:
    """A race on random numbers of 24 bits, on a vocabulary of 65,600: the tail is out of reach (vLLM#43150)."""
    return world.engine(rule=race_of(24), drafter=world.lookup())
