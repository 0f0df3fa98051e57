"""Heads of `draftproof train` in the format of speculators: read back, and run by speculators itself, to 1e-5."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draftproof.models.head import eagle3_file
from draftproof.models.head import file as headfile
from draftproof.models.head.attach_published import fitted_eagle3
from draftproof.models.head.checkpoint import Checkpoint
from draftproof.models.head.export import export, exportable_taps
from draftproof.models.head.network import Head
from draftproof.models.head.taps import shape_for
from models.numbered_weights import LENGTH, STEPS, VOCABULARY, states, tokens
from models.reference_environment import run_reference
from models.tiny_targets import tiny_target

HIDDEN, LAYERS = 16, 8
IDS = (7, 3, 20, 5, 1, 23, 11, 8)
"""The draft vocabulary, most frequent first: not in the order of the tokens."""
ENDS = LENGTH - STEPS


def target():
    return tiny_target(VOCABULARY, HIDDEN, LAYERS)


def saved_head(folder: Path, taps: tuple[int, ...] = (2, 4, 5), ids: tuple[int, ...] = IDS, name: str = "tiny") -> Head:
    """Save a head with random weights, and return it as it is read: in the precision of the file."""
    head = Head(shape_for(target(), taps), seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=generator)
    headfile.save(folder, head, headfile.meta_for(target(), ids, target=name, training={}, licence=""))
    return headfile.load(folder)[0]


@torch.no_grad()
def drafted(head, out) -> Tensor:
    """Return the logits at each step after each position, [STEPS, ENDS, R]; `out` turns a state into logits."""
    table, text = target().get_input_embeddings().weight, tokens()
    fused = head.fuse(states(HIDDEN * len(head.taps)).split(HIDDEN, -1))
    rows = []
    for end in range(ENDS):
        cache, n = head.new_cache(1, 2 * LENGTH), end + 1
        h = head.step(table[text[:, 1 : n + 1]], fused[:, :n], torch.arange(n)[None], cache)[:, -1:]
        logits = [out(h)[0, 0]]
        for step in range(1, STEPS):
            h = head.step(table[text[:, n + step, None]], h, torch.tensor([[end + step]]), cache)
            logits.append(out(h)[0, 0])
        rows.append(torch.stack(logits))
    return torch.stack(rows, 1)


def by_token(head: Head, ids: tuple[int, ...]) -> Tensor:
    """Return the head's own logits, in the order of the tokens."""
    rows = target().lm_head.weight[sorted(ids)]
    return drafted(head, lambda h: head.out(h) @ rows.T)


@pytest.mark.parametrize("ids", [IDS, tuple(range(VOCABULARY))])
def test_an_exported_head_reads_back_as_the_same(ids, tmp_path):
    head = saved_head(tmp_path / "head", ids=ids)
    export(tmp_path / "head", tmp_path / "out", target())
    read = eagle3_file.load(Checkpoint.of(tmp_path / "out"), LAYERS)
    assert read.network.taps == (2, 4, 5)
    assert list(range(VOCABULARY) if read.vocabulary.ids is None else read.vocabulary.ids) == sorted(ids)
    again = drafted(read.network, lambda h: read.network.out(h) @ read.vocabulary.output_rows.T)
    torch.testing.assert_close(again, by_token(head, ids), atol=1e-5, rtol=0)
    assert fitted_eagle3(tmp_path / "out", target()).table.shape == (VOCABULARY, HIDDEN)


@pytest.mark.slow
def test_speculators_computes_the_same_of_an_exported_head(tmp_path):
    target().save_pretrained(tmp_path / "target")
    head = saved_head(tmp_path / "head", name=str(tmp_path / "target"))
    export(tmp_path / "head", tmp_path / "out", target())
    run_reference("eagle3", tmp_path / "out", "exported")
    wanted = load_file(tmp_path / "out" / "expected.safetensors")["logits"]
    torch.testing.assert_close(by_token(head, IDS), wanted[:, :ENDS], atol=1e-5, rtol=0)
    without_norm = drafted(head, lambda h: h @ target().lm_head.weight[sorted(IDS)].T)
    assert float((without_norm - wanted[:, :ENDS]).abs().max()) > 0.1, "a wrong head would be seen"


def test_every_option_is_written_out(tmp_path):
    """Readers have different defaults: vLLM takes norm_before_residual to be true where nothing is said."""
    saved_head(tmp_path / "head")
    export(tmp_path / "head", tmp_path / "out", target())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {config[name] for name in ("norm_before_residual", "norm_before_fc", "norm_output")} == {False}
    assert config["fc_norm"] is True
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == 10_000.0
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_a_head_that_reads_the_last_layer_cannot_be_exported(tmp_path):
    saved_head(tmp_path / "head", taps=(2, 8))
    with pytest.raises(ValueError, match=r"after the last one, 8, are normed here .* train --export speculators"):
        export(tmp_path / "head", tmp_path / "out", target())
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_and_another_target_are_refused(tmp_path):
    saved_head(tmp_path / "head")
    with pytest.raises(ValueError, match="exists and is not empty"):
        export(tmp_path / "head", tmp_path, target())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file, and a head is exported to a folder"):
        export(tmp_path / "head", tmp_path / "file", target())
    with pytest.raises(ValueError, match="number of layers is 8; that of the target is 5"):
        export(tmp_path / "head", tmp_path / "out", tiny_target(VOCABULARY, HIDDEN, 5))


def test_taps_for_export_lie_before_the_last_layer():
    assert exportable_taps(32) == (2, 16, 29)
    assert exportable_taps(30) == (2, 15, 27)
    assert exportable_taps(3) == (1, 2)
    assert exportable_taps(2) == (1,)
    with pytest.raises(ValueError, match="1 layer has no states before its last"):
        exportable_taps(1)
