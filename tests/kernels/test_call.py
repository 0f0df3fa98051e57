"""Test what the kernels refuse and with which messages, what importing them costs, and torch.compile."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import draftproof as dp
from draftproof.kernels import serves, verify_rows
from draftproof.kernels.parameters import Parameters
from draftproof.kernels.workspace import Workspace
from kernels.side_by_side import kernel, make, parameters

S = dp.SamplingParams


@pytest.fixture(scope="module")
def given():
    return make([S(temperature=0.8)] * 2, V=600)


def test_an_unknown_rule_is_refused(given):
    with pytest.raises(dp.InexactError, match="token, block, coupled; got 'tree'"):
        kernel(given, "tree")


def test_logits_that_cannot_be_read_are_refused(given):
    with pytest.raises(ValueError, match=r"target_logits must be float32, bfloat16 or float16; got torch.float64"):
        kernel(replace(given, target=given.target.double()), "token")
    with pytest.raises(ValueError, match=r"target_logits must have its vocabulary axis contiguous"):
        kernel(replace(given, target=given.target.transpose(1, 2).contiguous().transpose(1, 2)), "token")
    with pytest.raises(ValueError, match=r"draft_logits must be \[2, 3, V\]"):
        kernel(replace(given, draft=given.draft[:, :2]), "token")


def test_a_vocabulary_without_its_map_is_refused(given):
    with pytest.raises(ValueError, match="are over 500 tokens, target_logits over 600: pass draft_entries"):
        verify_rows(given.target, given.tokens, given.draft[..., :500], parameters=parameters(given))


def test_a_small_workspace_is_refused(given):
    with pytest.raises(ValueError, match="workspace is too small for B=2, K=3, V=600"):
        kernel(given, "token", workspace=Workspace.empty(1, 3, 600, "cpu"))
    filtered = replace(given, samplings=[S(top_k=3)] * 2)
    with pytest.raises(ValueError, match="made with filtered=False"):
        kernel(filtered, "token", workspace=Workspace.empty(2, 3, 600, "cpu", filtered=False))


def test_a_workspace_that_lacks_tiles_is_refused():
    """3 x 4096 tokens have as many chunks as 2 x 6144, and fewer tiles: the scan would write past the end."""
    with pytest.raises(ValueError, match=r"tile_stats holds 6 of 8 numbers"):
        Workspace.empty(3, 0, 4096, "cpu", filtered=False).check(2, 0, 6144, filtered=False)
    Workspace.empty(2, 0, 6144, "cpu", filtered=False).check(2, 0, 6144, filtered=False)


def test_columns_have_names():
    rows = Parameters.empty(2, "cpu")
    rows["positions"].add_(7)
    assert rows.ints[:, 1].tolist() == [7, 7]
    with pytest.raises(KeyError, match="'position' is not a column; choose one of temperature"):
        rows["position"]


def test_only_cuda_tensors_are_served(given):
    assert not serves(given.target, given.tokens, "token")


def test_importing_the_package_does_not_import_triton():
    code = (
        "import sys; sys.modules['triton'] = None\nimport draftproof.kernels as k; k.Workspace.empty(1, 2, 600, 'cpu')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_torch_compile_takes_it_whole():
    """Runs in its own process: the shape checks that the tests add to every function cannot be compiled."""
    environment = {"TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parent.parent)}
    program = Path(__file__).parent / "compile_whole.py"
    command = [sys.executable, "-W", "ignore", str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
