"""What lies between the passes of a round that stays on a device, each one kernel instead of many small operations.

Their definitions in plain torch: round_steps_reference.py. All tensors are on one device, and nothing is read on the
host, so that every step can be captured. The table's lines: round_table.py.
"""

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.core.device import current_device
from draftproof.core.types import Draft
from draftproof.kernels import Rows
from draftproof.kernels.call import MOST_DRAFTED
from draftproof.kernels.parameters import INTS, Parameters

if TYPE_CHECKING:
    from draftproof.kernels.draw_rows import Drawn

WIDEST: Final = 64
"""Tokens of a row in a pass, at most; all widths share one compiled kernel."""

ROWS: Final = 128
"""Rows of a program of `describe_draws`."""

Reads = Literal["later", "at once", "when it drafts"]
"""When a drafter reads what a round emitted: in a later round, because it took no part in this one; at once, as heads
do; or as it drafts, as draft models do, all but the last token that they draw."""


class Layout(NamedTuple):
    """Where the tokens of a pass are.

    positions  of each token in its row, at most the model's last one
    slots      in the pool where keys and values are written, row after row; padding goes to the scratch page
    ends       index of each row's last token among all tokens of the pass
    """

    positions: Int[Tensor, "B T"]
    slots: Int[Tensor, " N"]
    ends: Int[Tensor, " B"]


class Steps(NamedTuple):
    """What a drafter needs of the texts of a round.

    most    tokens that each row may draft; 0 for a row that has ended
    tokens  what a draft model has not read: the last token, and the one before if it is behind by two
    places  [K, 3, B]: first slot in the drafter's pool, tokens before, and tokens to read, for each of K steps
    """

    most: Int[Tensor, " B"]
    tokens: Int[Tensor, "B 2"]
    places: Int[Tensor, "K 3 B"]


class Described(NamedTuple):
    """Drawn tokens, in the target's vocabulary, and their distributions as in `Distribution`."""

    tokens: Int[Tensor, " B"]
    cutoff: Float[Tensor, " B"]
    lse: Float[Tensor, " B"]
    point: Int[Tensor, " B"]


class Scoring(NamedTuple):
    """Tokens of the target's pass, and their places: first slot, tokens before, tokens to read (0: has ended)."""

    tokens: Int[Tensor, "B J"]
    places: Int[Tensor, "3 B"]


class Concluded(NamedTuple):
    """The end of a round.

    emitted  [B, J + 4]: tokens, then their count, draft tokens, tokens that the drafter has not read, and 1 for a fault
    counts   tokens that each row emitted
    """

    emitted: Int[Tensor, "B J4"]
    counts: Int[Tensor, " B"]


def lay_out(places: Int[Tensor, "3 B"], T: int, *, scratch: int, last_position: int) -> Layout:
    """Return where the tokens of rows of width T are; places as in `DevicePass`."""
    from draftproof.kernels.device import round_steps as device

    places, B = places.contiguous(), places.shape[1]
    made = Layout(places.new_empty((B, T)), places.new_empty(B * T), places.new_empty(B))
    with current_device(places.device):
        device.lay_out[(B,)](places, *made, scratch, last_position, T, BLOCK=WIDEST, num_warps=1)
    return made


def begin_draft(
    table: Int[Tensor, "9 B"], K: int, *, vocab_size: int, behind_text: int, ready: Bool[Tensor, " B"] | None = None
) -> Steps:
    """Return what a drafter needs to draft up to K tokens for each row of the table.

    vocab_size   tokens that a draft model knows; others are read as token 0
    behind_text  what the drafter has before step j: length - behind_text + j tokens
    ready        rows that can be drafted for; None: all
    """
    from draftproof.kernels.device import round_steps as device

    B = table.shape[1]
    # A fourth line for each step, so that all begin at a multiple of 16 bytes: attention is compiled for alignments.
    made = Steps(table.new_empty(B), table.new_empty((B, 2)), table.new_empty((K, 4, B))[:, :3])
    with current_device(table.device):
        device.begin_draft[(B,)](
            table, table if ready is None else ready, table.stride(0), K, vocab_size, behind_text, *made,
            BLOCK=WIDEST, SOME_READY=ready is not None, num_warps=1,
        )  # fmt: skip
    return made


def describe_draws(drawn: "Drawn", greedy: Bool[Tensor, " B"] | None, ids: Int[Tensor, " R"] | None) -> Described:
    """Return what the kernels drew as a distribution's numbers; greedy rows are one-hot.

    ids  the target's token of each entry that was drawn from; None: they are the same
    """
    from draftproof.kernels.device import round_steps as device

    tokens, cutoff, base, mass = drawn
    B = len(tokens)
    made = Described(
        tokens.new_empty(B), cutoff.new_empty(B, dtype=torch.float32), cutoff.new_empty(B), tokens.new_empty(B)
    )
    assert cutoff.stride() == base.stride() == mass.stride()
    assert tokens.is_contiguous()
    with current_device(tokens.device):
        device.describe_draws[(-(-B // ROWS),)](
            tokens, cutoff, base, mass, tokens if greedy is None else greedy, tokens if ids is None else ids, *made,
            B, cutoff.stride(0), BLOCK=ROWS, SOME_GREEDY=greedy is not None, MAPPED=ids is not None,
        )  # fmt: skip
    return made


def begin_scoring(table: Int[Tensor, "9 B"], draft: Draft, vocab_size: int, parameters: Parameters) -> Scoring:
    """Return the target's pass over drafts; write the positions and lengths of the verification's parameters."""
    from draftproof.kernels.device import round_steps as device

    B, K = draft.tokens.shape
    assert parameters.ints.is_contiguous()
    made = Scoring(table.new_empty((B, K + 1)), table.new_empty((3, B)))
    with current_device(table.device):
        device.begin_scoring[(B,)](
            table, draft.tokens.contiguous(), draft.lengths.contiguous(), parameters.ints, table.stride(0), K,
            vocab_size, *made, COLUMNS=len(INTS), POSITIONS=INTS.index("positions"), DRAFTED=INTS.index("lengths"),
            BLOCK=MOST_DRAFTED, num_warps=1,
        )  # fmt: skip
    return made


def conclude(table: Int[Tensor, "9 B"], verdict: Rows, lengths: Int[Tensor, " B"], reads: Reads) -> Concluded:
    """Write where the next round starts to the table, and return what the host is to know.

    A row with a fault stays as it was and takes no part in later rounds. lengths: of the drafts
    """
    from draftproof.kernels.device import round_steps as device

    B, J = verdict.tokens.shape
    made = Concluded(table.new_empty((B, J + 4)), table.new_empty(B))
    names = {"later": device.READS_LATER, "at once": device.READS_AT_ONCE, "when it drafts": device.READS_DRAFTING}
    with current_device(table.device):
        device.conclude[(B,)](
            table, verdict.tokens.contiguous(), verdict.accepted, verdict.faults, lengths.contiguous(),
            table.stride(0), J, *made, READS=names[reads].value, BLOCK=WIDEST, num_warps=1,
        )  # fmt: skip
    return made
