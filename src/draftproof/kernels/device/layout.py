"""Define the columns of the parameter tensors and of the workspace, shared by host and device code.

A *distribution row* is one row of logits from which a distribution is made. A request has J + K of them: its J target
rows, then its K draft rows. All per-row data of a distribution row lies at index b · (J + K) + row.

Terms used in these files: a row is read in slices (SLICE tokens); PER_CHUNK slices make a chunk, the unit in which
`draftproof.core.draw` draws; PER_TILE chunks make a tile, the unit that one program of the scan reads. The mass of some
logits is the sum of exp((logit − base) / temperature), with the base stated beside it. "Warm" means temperature > 0.
"""

import triton.language as tl

from draftproof.core.draw import CHUNK as _CHUNK
from draftproof.kernels.parameters import FLOATS as _FLOATS
from draftproof.kernels.parameters import INTS as _INTS
from draftproof.kernels.workspace import PART_SUMS as _PART_SUMS
from draftproof.kernels.workspace import PARTS as _PARTS
from draftproof.kernels.workspace import PER_CHUNK as _PER_CHUNK
from draftproof.kernels.workspace import PER_TILE as _PER_TILE
from draftproof.kernels.workspace import PIVOTS as _PIVOTS
from draftproof.kernels.workspace import ROUNDS as _ROUNDS
from draftproof.kernels.workspace import ROW_STATS as _ROW_STATS
from draftproof.kernels.workspace import SHORTLIST as _SHORTLIST
from draftproof.kernels.workspace import WORK as _WORK

CHUNK = tl.constexpr(_CHUNK)
PER_TILE = tl.constexpr(_PER_TILE)
PER_CHUNK = tl.constexpr(_PER_CHUNK)
SLICE = tl.constexpr(_CHUNK // _PER_CHUNK)  # small enough that a search for the largest logits skips most slices

# Parameters.floats; the draft's three columns follow at an offset of DRAFT_SIDE
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
TOP_K = tl.constexpr(_INTS.index("top_k"))  # the draft's is the next column
TARGET_ROW = tl.constexpr(_INTS.index("target_rows"))
DRAFT_ROW = tl.constexpr(_INTS.index("draft_rows"))

# Workspace.row_stats, float64, one line per distribution row. The log-sum-exp is stored as BASE + log(MASS), so that
# only its consumers pay for the log
ROW_STATS = tl.constexpr(_ROW_STATS)
CUTOFF = tl.constexpr(0)  # smallest logit kept by the filters; for a greedy row: its argmax token
BASE = tl.constexpr(1)  # lse = BASE + log MASS
MASS = tl.constexpr(2)  # NaN: the row is not a distribution
WEIGHT = tl.constexpr(3)  # target rows under `block`: log w
SLOPE = tl.constexpr(4)  # under `block`: parameters of p (`draftproof.kernels.device.distribution.DistParams`)
CENTRE = tl.constexpr(5)
GAIN = tl.constexpr(6)

# The same columns while a row is in the queue of `settle`: what `settle` found out about it
LOW = tl.constexpr(3)  # lower bound of the cutoff
GUESS = tl.constexpr(4)  # estimate of the cutoff, from a sample
TOTAL = tl.constexpr(5)  # mass of the row relative to its largest logit
PEAK = tl.constexpr(6)  # largest logit of the row

# Bits of a fault code (`draftproof.kernels.Rows.faults`)
BAD_TARGET = tl.constexpr(1)
BAD_DRAFT = tl.constexpr(2)
BAD_TOKEN = tl.constexpr(4)

# Workspace.work, float32, one line per distribution row: SHORTLIST logits, two queue columns, a list of slices
WORK = tl.constexpr(_WORK)
SHORTLIST = tl.constexpr(_SHORTLIST)
QUEUE_ENTRY = tl.constexpr(_SHORTLIST)  # in line n: index of the n-th queued distribution row
QUEUE_LENGTH = tl.constexpr(_SHORTLIST + 1)  # in line 0 only: number of queued rows

# Workspace.part_sums, float64, one line per distribution row: for each round the mass that reaches each of PIVOTS
# pivots; then for each part the count of logits left, the smallest and the largest of them
PART_SUMS = tl.constexpr(_PART_SUMS)
PARTS = tl.constexpr(_PARTS)
PIVOTS = tl.constexpr(_PIVOTS)
COUNTS = tl.constexpr(_ROUNDS * _PIVOTS)
SMALLEST = tl.constexpr(COUNTS.value + _PARTS)
LARGEST = tl.constexpr(SMALLEST.value + _PARTS)
