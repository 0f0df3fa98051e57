"""Test that compiled kernels are found again by what Triton would have compiled them for."""

import subprocess
import sys
from pathlib import Path

import torch

from draftproof.kernels.compile import kind_of

HERE = Path(__file__).parent
FLAGS = (True, torch.float32, 4)


def test_calls_of_one_kind_share_their_kernels():
    one, other = torch.zeros(64), torch.zeros(64)
    assert kind_of(FLAGS, (one,), (64, 1)) == kind_of(FLAGS, (other,), (64, 1))


def test_what_triton_compiles_anew_for_is_another_kind():
    x = torch.zeros(64)
    kinds = [
        kind_of(FLAGS, (x,), (64, 1)),
        kind_of((False, *FLAGS[1:]), (x,), (64, 1)),
        kind_of(FLAGS, (x.half(),), (64, 1)),
        kind_of(FLAGS, (x[1:],), (64, 1)),  # not aligned to 16 bytes
        kind_of(FLAGS, (x,), (60, 1)),
        kind_of(FLAGS, (x,), (64, 2)),
    ]
    assert len(set(kinds)) == len(kinds)


def test_a_kernel_is_looked_for_once(tmp_path):
    """Runs in a process that compiles: `run` asks Triton the first time, and again only for another kind."""
    environment = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(HERE / "run_twice.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["asked", "launched", "launched", "asked", "launched"], done.stderr[-2000:]
