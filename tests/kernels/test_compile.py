"""Test that every kernel compiles for every GPU generation it claims to run on, without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def printed(tmp_path: Path, program: str, *arguments: str) -> list[str]:
    """Run a program in its own process, as Triton decides at import whether it compiles or interprets."""
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


@pytest.mark.parametrize(
    ("capability", "V"),
    [(90, 4096), *(pytest.param(c, v, marks=pytest.mark.slow) for c, v in ((80, 4096), (100, 4096), (90, 128256)))],
)
def test_kernels_compile(capability, V, tmp_path):
    blocks = ["block_walk", "block_sums", "block_close"]
    settled = ["scan", "settle", "settle_deep", "token", "token_residual"]
    want = ["scan", "token", "token_residual", *blocks, "scan", "coupled", *settled]
    assert printed(tmp_path, "compile_all.py", str(capability), str(V)) == want


@pytest.mark.slow
def test_a_kernel_is_compiled_once_for_all_draft_lengths_and_filters(tmp_path):
    """A first request waits for these. The scan is compiled twice: filters need more of it."""
    seen = printed(tmp_path, "compile_once.py")
    assert sorted(seen) == ["block_close", "block_sums", "block_walk", "coupled", "scan", "scan", "settle"]


def test_kernels_have_their_names_before_the_first_is_launched(tmp_path):
    """Otherwise Triton 3.6 names them by which was launched first, and does not find what another process compiled."""
    assert printed(tmp_path, "compile_names.py") == []


@pytest.mark.parametrize("capability", [90, *(pytest.param(c, marks=pytest.mark.slow) for c in (80, 100))])
def test_the_steps_of_a_round_and_of_its_layers_compile(capability, tmp_path):
    seen = set(printed(tmp_path, "compile_steps.py", str(capability)))
    between = {"lay_out", "begin_draft", "describe_draws", "begin_scoring", "conclude"}
    assert seen == between | {"rms_norm", "gate", "rotate", "rotate_and_write"}
