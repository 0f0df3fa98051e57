"""Every kernel compiles for every generation it claims to run on, without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "compile_all.py"


@pytest.mark.parametrize(
    ("capability", "V"),
    [(90, 4096), *(pytest.param(c, v, marks=pytest.mark.slow) for c, v in ((80, 4096), (100, 4096), (90, 128256)))],
)
def test_kernels_compile(capability, V, tmp_path):
    """In a process of its own: Triton either compiles or interprets, whichever it was imported for."""
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(capability), str(V)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    blocks = ["block_walk", "block_sums", "block_close"]
    assert done.stdout.split() == [
        "scan",
        "token",
        *blocks,
        "scan",
        "coupled",
        "scan",
        "settle",
        "settle_deep",
        "token",
    ]
