"""A lesson is the target's own distribution, at the right place, on the head's vocabulary."""

import torch

from draftproof.train.generate import Texts
from draftproof.train.target import TargetSignals
from train.tiny_target import pupil

IDS = torch.tensor([7, 3, 200, 11, 50])


def texts(rows=4, length=12):
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, (rows, length), dtype=torch.int32, generator=numbers)
    return Texts(tokens, torch.rand(rows, length, generator=numbers) < 0.5)


def test_distributions_are_those_of_the_token_that_is_guessed():
    some = texts()
    teacher = TargetSignals(pupil(), (1, 3), IDS)
    lesson = teacher.lesson(some, skip=2)
    with torch.no_grad():
        shown = pupil()(some.tokens.long(), output_hidden_states=True)
    N = 10
    wanted = [(row, n) for row in range(4) for n in range(2, N) if some.spoken[row, n + 2]]
    assert [(int(at) // N, int(at) % N) for at in lesson.at] == wanted
    for k, (row, n) in enumerate(wanted):
        dist = shown.logits[row, n + 1].softmax(-1)
        torch.testing.assert_close((lesson.scores[k] - lesson.lse[k]).exp(), dist[IDS])
        best = int(dist.argmax())
        assert int(lesson.best[k]) == (IDS.tolist().index(best) if best in IDS else -1)
    torch.testing.assert_close(lesson.states[1], shown.hidden_states[3][:, :N])
    torch.testing.assert_close(lesson.embedded, pupil().get_input_embeddings().weight[some.tokens[:, 1:-1].long()])


def test_likeliest_tokens_outside_the_vocabulary_are_told():
    lesson = TargetSignals(pupil(), (3,), IDS).lesson(texts(), skip=0)
    assert (lesson.best == -1).any()
