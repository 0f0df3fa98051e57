"""What a kernel is given: one bundle of pointers, sizes and traits, the same for all kernels of a call."""

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """K, V as everywhere; R entries in a draft row. The others follow (`draftproof.kernels.request`).

    K is a float: Triton would compile a kernel anew for a whole number that is 1, and for one that 16 divides.
    """

    K: Any
    V: Any
    R: Any


class Strides(NamedTuple):
    """In elements: from request to request, and from position to position."""

    target: Any
    target_row: Any
    draft: Any
    draft_row: Any
    allowed: Any
    allowed_row: Any


class Lists(NamedTuple):
    """The edits (`draftproof.kernels.edits.Edits`), target side and draft side, E places each."""

    first: Any  # [B, 2, C + 1]
    tokens: Any  # [B, 2, E]
    amounts: Any  # [B, J + K, E, 4]
    E: Any  # a float, like K


class Traits(NamedTuple):
    """What is known when a kernel is compiled, each a constexpr. What is off costs nothing."""

    DRAWN: Any  # the draft has logits; otherwise its tokens were chosen
    READ_DRAFT: Any  # the draft's rows are scanned: they are there, the rule needs them, their lse was not handed over
    FILTERED: Any
    WARM: Any  # some request may have a temperature above 0
    EDITED: Any
    MASKED: Any
    MAPPED: Any  # the draft vocabulary is part of the target's
    ALIKE: Any  # target and draft logits are of one type
    OVERLAP: Any  # a kernel may start while the one before it ends (Hopper and later)
    SEGMENT: Any  # tokens in 128 bytes of target logits
    KP: Any  # a power of 2, more than K
    NP: Any  # a power of 2, at least the chunks in a row
    TP: Any  # the same of tiles
    NS: Any  # the same of slices


class Batch(NamedTuple):
    """Pointers to everything, and the three above. Layouts: `draftproof.kernels.layout`."""

    target: Any
    draft: Any
    drafted: Any  # [B, K]
    entries: Any  # [V], the draft vocabulary's entry of each token
    allowed: Any  # packed bits, 32 a word
    floats: Any
    ints: Any
    edits: Any
    stats: Any  # [B · (J + K), 2, C]: of each chunk the largest logit and the mass relative to it
    slices: Any  # the same of each slice
    tiles: Any  # and of each tile
    numbers: Any  # [B · (J + K), NUMBERS]
    work: Any  # where `settle` writes down slices and logits
    parts: Any  # [B · (J + K), MEASURED]
    strides: Any
    sizes: Any
    traits: Any


class Out(NamedTuple):
    tokens: Any  # [B, J]
    accepted: Any  # [B]
    faults: Any  # [B]
