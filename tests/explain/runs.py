"""Recorded runs for the tests: a table of logits as target, and drafters that draw or choose."""

from draftproof.drafters.model import ModelDrafter
from draftproof.engine.load import load
from draftproof.explain.explanation import Explanation
from draftproof.explain.recorder import Recorder
from draftproof.models.toy import Toy
from models.tiny_tokenizers import byte_level

V = len(byte_level())
TARGET = Toy.random(V, spread=3.0, seed=1)


def drawing() -> ModelDrafter:
    """Return a drafter that agrees with the target in part, so that some guesses are kept and some rejected."""
    return ModelDrafter(Toy(0.8 * TARGET.table + 0.5 * Toy.random(V, seed=2).table))


def recorded(rule: str, drafter: object, *, seed: int = 0, tokens: int = 48, **sampling: object) -> Explanation:
    """Generate a text and return it with its rounds."""
    recorder = Recorder(rule)
    engine = load(TARGET, drafter, rule=recorder, num_draft_tokens=4, tokenizer=byte_level())
    output = engine.generate("the quick brown fox", seed=seed, max_tokens=tokens, **sampling)
    return Explanation(
        "the quick brown fox", {"rule": rule}, recorder.rounds, output.tokens, output.stats, byte_level()
    )
