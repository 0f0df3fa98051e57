"""Where things stand in memory: the columns of the parameter tensors and of the workspace, for host and device alike.

A *distribution row* is one row of logits that a distribution is made of. A request has J + K of them: its J target rows, then its K
draft rows. Whatever the kernels remember of a distribution row stands at index b · (J + K) + row.
"""

import triton.language as tl

from draftproof.core.draw import CHUNK as _CHUNK
from draftproof.kernels.parameters import FLOATS as _FLOATS
from draftproof.kernels.parameters import INTS as _INTS
from draftproof.kernels.workspace import FEW as _FEW
from draftproof.kernels.workspace import MEASURED as _MEASURED
from draftproof.kernels.workspace import NUMBERS as _NUMBERS
from draftproof.kernels.workspace import PARTS as _PARTS
from draftproof.kernels.workspace import PER_CHUNK as _PER_CHUNK
from draftproof.kernels.workspace import PER_TILE as _PER_TILE
from draftproof.kernels.workspace import PIVOTS as _PIVOTS
from draftproof.kernels.workspace import ROUNDS as _ROUNDS
from draftproof.kernels.workspace import WORK as _WORK

CHUNK = tl.constexpr(_CHUNK)
PER_TILE = tl.constexpr(_PER_TILE)
PER_CHUNK = tl.constexpr(_PER_CHUNK)
SLICE = tl.constexpr(_CHUNK // _PER_CHUNK)  # fine enough to skip most of a row when looking for its largest

# Parameters.floats; the draft's three stand DRAFT_SIDE further on
FLOAT_COLUMNS = tl.constexpr(len(_FLOATS))
TEMPERATURE = tl.constexpr(_FLOATS.index("temperature"))
TOP_P = tl.constexpr(_FLOATS.index("top_p"))
MIN_P = tl.constexpr(_FLOATS.index("min_p"))
DRAFT_SIDE = tl.constexpr(_FLOATS.index("draft_temperature"))

# Parameters.ints
INT_COLUMNS = tl.constexpr(len(_INTS))
SEED = tl.constexpr(_INTS.index("seeds"))
START = tl.constexpr(_INTS.index("positions"))
LENGTH = tl.constexpr(_INTS.index("lengths"))
TOP_K = tl.constexpr(_INTS.index("top_k"))  # the draft's stands next to it
TARGET_ROW = tl.constexpr(_INTS.index("target_rows"))
DRAFT_ROW = tl.constexpr(_INTS.index("draft_rows"))

# Workspace.numbers, float64, one line a distribution row. The log-sum-exp is in two parts: a logarithm is best taken by who
# needs it, of the few rows he needs it of
NUMBERS = tl.constexpr(_NUMBERS)
CUTOFF = tl.constexpr(0)  # of a greedy row: the token it stands for
BASE = tl.constexpr(1)  # lse = BASE + log MASS
MASS = tl.constexpr(2)  # NaN: the row is no distribution
WEIGHT = tl.constexpr(3)  # target rows under `block`: log w
SLOPE = tl.constexpr(4)  # under `block`: what p is made of (`draftproof.kernels.distributions.Numbers`)
CENTRE = tl.constexpr(5)
GAIN = tl.constexpr(6)

# The same places while a row is in the queue: what `settle` knows of it
LOW = tl.constexpr(3)  # its cutoff does not lie under this
GUESS = tl.constexpr(4)  # it may lie here
TOTAL = tl.constexpr(5)  # its mass relative to its largest logit's
PEAK = tl.constexpr(6)  # its largest logit

# Faults, bits
BAD_TARGET = tl.constexpr(1)
BAD_DRAFT = tl.constexpr(2)
BAD_TOKEN = tl.constexpr(4)

# Workspace.work, float32, one line a distribution row: FEW logits, the queue's places, a list of slices
WORK = tl.constexpr(_WORK)
FEW = tl.constexpr(_FEW)
QUEUE = tl.constexpr(_FEW)  # of line n: the n-th row in the queue
QUEUED = tl.constexpr(_FEW + 1)  # of line 0: how many are in it

# Workspace.parts, float64, one line a distribution row: what reaches PIVOTS numbers, for each round; of each part how
# many logits are left, the least and the largest of them
MEASURED = tl.constexpr(_MEASURED)
PARTS = tl.constexpr(_PARTS)
PIVOTS = tl.constexpr(_PIVOTS)
COUNTS = tl.constexpr(_ROUNDS * _PIVOTS)
LEAST = tl.constexpr(COUNTS.value + _PARTS)
MOST = tl.constexpr(LEAST.value + _PARTS)
