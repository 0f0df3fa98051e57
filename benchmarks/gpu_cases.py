"""Define what the GPU benchmark measures: sizes, settings, the times to meet, and the peers' times."""

from dataclasses import dataclass

import draftproof as dp

K, V = 4, 128256
BATCHES = (1, 8, 64, 256)
COLD = 1.2e9  # bytes of input that a graph reads at least: twenty times the L2 cache
WARM = dp.SamplingParams(temperature=0.8)
SETTINGS: dict[str, dp.SamplingParams] = {
    "temperature": WARM,
    "top-k 50, top-p 0.9": dp.SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "top-p 0.95": dp.SamplingParams(temperature=0.8, top_p=0.95),
    "greedy": dp.SamplingParams(temperature=0.0),
}
MIXED = [
    SETTINGS["temperature"],
    SETTINGS["top-k 50, top-p 0.9"],
    SETTINGS["top-p 0.95"],
    dp.SamplingParams(min_p=0.05),
]
BARS = {  # microseconds, for the BATCHES (issue 6)
    ("float32", "temperature"): (11, 17, 82, 310),
    ("float32", "top-k 50, top-p 0.9"): (20, 32, 120, 450),
    ("float32", "top-p 0.95"): (35, 55, 220, 850),
    ("float32", "greedy"): (4.5, 8.5, 44, 155),
    ("bfloat16", "temperature"): (9, 14, 50, 185),
    ("bfloat16", "top-k 50, top-p 0.9"): (18, 28, 85, 320),
}
PEERS: dict[tuple[str, str, str], dict[str, tuple[float | None, ...]]] = {  # KERNELS.md, for the BATCHES
    ("float32", "temperature", "token"): {
        "torch": (162, 225, 881, 2971),
        "vLLM v1": (195, 280, 933, 3373),
        "vLLM v2": (23.4, 48.2, 291, 1077),
        "FlashInfer": (83, 128, 382, 1143),
        "SGLang": (92, 137, 486, 1483),
    },
    ("float32", "temperature", "block"): {"vLLM v2": (31.1, 58.9, 346, 1279)},
    ("float32", "top-k 50, top-p 0.9", "token"): {
        "torch": (546, 1081, 6736, 21456),
        "vLLM v1": (423, 481, 1109, 3760),
        "vLLM v2": (135, 164, 675, 2326),
        "FlashInfer": (191, 300, 1474, 4957),
        "SGLang": (213, 334, 1697, 5727),
    },
    ("float32", "greedy", "token"): {
        "torch": (54, None, 83.5, 204),
        "vLLM v1": (69, None, 268, 850),
        "vLLM v2": (12.0, None, 56.3, 182),
        "SGLang": (44.6, None, 72.1, 189),
    },
    ("bfloat16", "temperature", "token"): {
        "vLLM v2": (None, None, 318, 1189),
        "FlashInfer": (None, None, 598, 1995),
    },
    ("bfloat16", "top-k 50, top-p 0.9", "token"): {
        "vLLM v2": (None, None, 714, None),
        "FlashInfer": (None, None, 1601, None),
    },
}


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    dtype: str
    setting: str
    rule: str = "token"
    draft: str = "drawn, same sampling"
    rows: str = "zipf"


CASES = [
    *(Case(dtype, setting) for dtype, setting in BARS),
    Case("bfloat16", "top-p 0.95"),
    Case("bfloat16", "greedy"),
    *(Case("float32", "temperature", rule) for rule in ("block", "coupled")),
    Case("bfloat16", "temperature", "block"),
    Case("float32", "top-k 50, top-p 0.9", "block"),
    Case("float32", "temperature", draft="chosen"),
    Case("float32", "top-k 50, top-p 0.9", draft="drawn, temperature only"),
    Case("float32", "top-p 0.95", draft="drawn, temperature only"),
    Case("float32", "every row different", draft="drawn, temperature only"),
    *(Case("float32", setting, rows="flat") for setting in ("temperature", "top-k 50, top-p 0.9", "top-p 0.95")),
]
