"""A training batch holds the target's own distributions, at the right positions, on the head's vocabulary."""

import torch

from draftproof.train.generate import Texts
from draftproof.train.target import TargetSignals
from train.tiny_target import tiny_llama

IDS = torch.tensor([7, 3, 200, 11, 50])


def texts(rows=4, length=12):
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(300, (rows, length), dtype=torch.int32, generator=numbers)
    return Texts(tokens, torch.rand(rows, length, generator=numbers) < 0.5)


def test_distributions_are_those_of_the_token_to_be_drafted():
    some = texts()
    signals = TargetSignals(tiny_llama(), (1, 3), IDS)
    batch = signals.batch(some, skip=2)
    with torch.no_grad():
        output = tiny_llama()(some.tokens.long(), output_hidden_states=True)
    N = 10
    wanted = [(row, n) for row in range(4) for n in range(2, N) if some.is_answer[row, n + 2]]
    assert [(int(at) // N, int(at) % N) for at in batch.at] == wanted
    for k, (row, n) in enumerate(wanted):
        dist = output.logits[row, n + 1].softmax(-1)
        torch.testing.assert_close((batch.scores[k] - batch.lse[k]).exp(), dist[IDS])
        best = int(dist.argmax())
        assert int(batch.best[k]) == (IDS.tolist().index(best) if best in IDS else -1)
    torch.testing.assert_close(batch.states[1], output.hidden_states[3][:, :N])
    torch.testing.assert_close(batch.embedded, tiny_llama().get_input_embeddings().weight[some.tokens[:, 1:-1].long()])


def test_likeliest_tokens_outside_the_vocabulary_are_marked():
    batch = TargetSignals(tiny_llama(), (3,), IDS).batch(texts(), skip=0)
    assert (batch.best == -1).any()
