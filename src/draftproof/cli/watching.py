"""A generation watched through a recorder: rounds shown as they come, and an explanation at the end."""

from functools import partial
from typing import Any

from draftproof.cli.options import Choice
from draftproof.cli.screen import screen
from draftproof.cli.streaming import Answer, in_words, streamed
from draftproof.cli.waiting import waiting
from draftproof.engine.engine import Engine
from draftproof.explain.explanation import Explanation, label
from draftproof.explain.recorder import Recorder
from draftproof.explain.terminal import legend, show_round


def settings_of(choice: Choice, sampling: dict[str, Any]) -> dict[str, str]:
    """What was asked for, as a page shows it."""
    asked = {
        "target": choice.target,
        "drafter": choice.drafter or "none",
        "rule": choice.rule,
        "draft length": choice.num_draft_tokens,
        **{name.replace("_", "-"): value for name, value in sampling.items() if value not in (None, 0.0, 1.0)},
        "temperature": sampling["temperature"],
    }
    return {name: str(value) for name, value in asked.items()}


def explained(
    engine: Engine, prompt: str, options: dict[str, Any], recorder: Recorder, settings: dict[str, str], *, show: bool
) -> Explanation:
    """Generate and explain. Ctrl-C ends the text; the rounds that were made are explained."""
    made = Answer()
    assert engine.tokenizer is not None
    try:
        if show:
            _shown(engine, prompt, options, made, recorder)
        else:
            with waiting("Generating"):
                for _ in streamed(engine, prompt, options, made):
                    pass
    except KeyboardInterrupt:
        pass
    return Explanation(prompt, settings, recorder.rounds, made.tokens, made.stats, engine.tokenizer)


def _shown(engine: Engine, prompt: str, options: dict[str, Any], made: Answer, recorder: Recorder) -> None:
    assert engine.tokenizer is not None
    console, words = screen(), partial(label, engine.tokenizer)
    console.print(legend())
    done = 0
    for _ in streamed(engine, prompt, options, made):
        for round_ in recorder.rounds[done:]:
            done += 1
            show_round(console, done, round_, words)
    console.print()
    console.print(made.text, markup=False, soft_wrap=True)
    console.print(in_words(made), style="bright_black", soft_wrap=True)
