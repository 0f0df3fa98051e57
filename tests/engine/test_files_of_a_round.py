"""One round passes through few files: a newcomer who follows it opens at most twenty-six (docs/decisions.md)."""

import sys
from pathlib import Path

import draftproof as dp
from draftproof.drafters.head import HeadDrafter
from draftproof.engine import scheduler as batches
from engine.tiny import PROMPT, llama
from engine.tiny_heads import on_target

ROOT = str(Path(dp.__file__).parent)
MOST = 26


def files_of_a_round(monkeypatch, model, drafter) -> set[str]:
    """Return the files of the package in which a function is called during the third round of two rows."""
    advance, rounds, seen = batches.advance, [], set()

    def profile(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(ROOT):
            seen.add(file[len(ROOT) + 1 :])

    def traced(*arguments):
        rounds.append(1)
        if len(rounds) != 3:
            return advance(*arguments)
        sys.setprofile(profile)
        try:
            return advance(*arguments)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(batches, "advance", traced)
    engine = dp.load(model, drafter, rule="block", num_draft_tokens=4)
    engine.generate([list(PROMPT)] * 2, dp.SamplingParams(temperature=0.8, top_p=0.9, seed=1), max_tokens=30)
    assert len(rounds) >= 3
    return seen


def test_a_round_with_a_head_passes_through_at_most_twenty_six_files(monkeypatch):
    seen = files_of_a_round(monkeypatch, llama(), HeadDrafter(on_target()))
    assert len(seen) <= MOST, sorted(seen)
    assert {"engine/round.py", "rules/block.py", "drafters/head.py", "models/hf.py", "core/filters.py"} <= seen


def test_the_bundled_model_adds_its_packed_linear_layers_and_stays_within_the_limit(monkeypatch, smollm2):
    model, _ = smollm2
    assert len(files_of_a_round(monkeypatch, model, "head") | {"models/cpu_linear.py"}) <= MOST
