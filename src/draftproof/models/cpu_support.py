"""Find out once whether this CPU runs four-bit products fast and without crashing, and remember it.

bfloat16 instructions crash on some machines that announce them, so they are tried in a child process. The answer is
kept in the cache folder, for this version of torch and this kind of CPU.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import torch

PROBE_SECONDS: Final = 120
"""Seconds that the child may take: importing torch on a busy machine is slow."""

PROBE: Final = """
import torch
x = torch.arange(64.).reshape(2, 32).bfloat16()
codes = torch.arange(32, dtype=torch.int32).expand(64, 32) % 16
packed = torch._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)
made = torch._weight_int4pack_mm_for_cpu(x, packed, 32, torch.ones((1, 64, 2), dtype=torch.bfloat16))
assert torch.equal(made.float(), (x.float() @ (codes.float() - 7).T).bfloat16().float())
weight = torch.ops.onednn.qlinear_prepack(torch.ones((64, 32), dtype=torch.int8), None)
made = torch.ops.onednn.qlinear_pointwise(
    torch.full((2, 32), 130, dtype=torch.uint8), 1.0, 128, weight, torch.ones(64), torch.zeros(64, dtype=torch.long),
    None, 1.0, 0, torch.float32, "none", [], "")
assert torch.equal(made, torch.full((2, 64), 64.0))
"""
"""A program that ends with status 0 where both kernels compute what they should."""


@cache
def int4_refusal() -> str | None:
    """Return why four-bit weights are not used on this CPU; None where they are."""
    needed = ("_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu")
    if not all(hasattr(torch, name) for name in needed) or not hasattr(torch.ops.onednn, "qlinear_prepack"):
        return f"torch {torch.__version__} has no four-bit products for CPUs"
    if platform.machine() not in ("x86_64", "AMD64") or not torch.cpu._is_avx512_supported():
        return "this CPU has no AVX-512, without which four-bit products are slower than float32"
    if not torch.cpu._is_vnni_supported():
        return "this CPU has no AVX-512 VNNI, without which eight-bit products are slow"
    return None if _works() else "four-bit products crashed or gave wrong results on this CPU when they were tried"


def _works() -> bool:
    """Return what the probe found, now or earlier."""
    path = _remembered()
    try:
        return bool(json.loads(path.read_text(encoding="utf-8"))["works"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        child = [sys.executable, "-c", PROBE]
        works = subprocess.run(child, capture_output=True, timeout=PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False  # not remembered: it may be another time
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"works": works, "torch": torch.__version__, "cpu": _cpu()}), encoding="utf-8")
        scratch.replace(path)
    except OSError:
        pass  # a cache that cannot be written costs a probe at every start
    return works


def _remembered() -> Path:
    from draftproof.models.bundled import cache_root

    key = hashlib.sha256(f"{torch.__version__} {PROBE} {_cpu()}".encode()).hexdigest()[:16]
    return cache_root() / f"int4-{key}.json"


def _cpu() -> str:
    """Return the CPU's model and flags, as far as the operating system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    kept = ("vendor_id", "cpu family", "model", "stepping", "flags")
    return "; ".join(line for line in lines if line.split("\t")[0].strip() in kept)
