"""What libraries remember is bounded in a server, so that its memory does not grow with the requests it has served."""

import ctypes
import os
import subprocess
import sys

import pytest

from draftproof.serve.memory import WORDS_KEPT, limit_word_cache
from serve.running import load, serving

LIBC = ctypes.CDLL(None)
BYTES_A_WORD = 1000
"""More than a remembered word takes."""


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", *"abc", "hblkhd", *"de", "uordblks", "fordblks", "keepcost")  # the others are not read
    ]


def bytes_in_use() -> int:
    LIBC.mallinfo2.restype = MallocInfo
    info = LIBC.mallinfo2()
    return info.uordblks + info.hblkhd


@pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="needs glibc 2.33")
def test_new_words_in_prompts_do_not_make_a_server_grow(folder):
    engine = load(folder)
    with serving(engine):
        before = bytes_in_use()
        for i in range(8000):
            engine.tokenizer.encode(f"word{i * 7919**3}")
        grown = bytes_in_use() - before
    assert grown < WORDS_KEPT * BYTES_A_WORD, f"{grown} bytes more after 8000 words"


def test_a_tokenizer_that_remembers_nothing_is_left_alone():
    limit_word_cache(object())


PRODUCTS = """
import sys
import torch
from draftproof.models.cpu_linear import PackedLinear, padded_rows
from draftproof.serve.memory import limit_kernel_cache
from serve.test_memory import bytes_in_use

if sys.argv[1] == "limited":
    limit_kernel_cache()
layers = [PackedLinear(torch.nn.Linear(32 * n, 32)) for n in range(1, 6)]
grown = []
with torch.inference_mode():
    for numbers in (range(1, 41), range(41, 1025)):
        before = bytes_in_use()
        for rows in sorted({padded_rows(n) for n in numbers}):
            for layer in layers:
                layer(torch.ones(rows, layer.in_features))
        grown.append(bytes_in_use() - before)
print(*grown)
"""


@pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize("kept", ["limited", "all"])
def test_rare_numbers_of_rows_do_not_make_a_server_grow(kept):
    """130 products are compiled first, and then 235 others: without a limit they take twice as much."""
    places = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", PRODUCTS, kept], env=places, capture_output=True, text=True, check=True)
    first, more = map(int, run.stdout.split())
    assert (more < 0.01 * first) == (kept == "limited"), f"{first} bytes, then {more}"
