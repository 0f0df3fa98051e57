"""Models that are loaded by name are whole: transformers would fill what a checkpoint lacks with random numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import draftproof as dp
from draftproof.models.loading import LoadOptions, load_model
from engine.perfect_drafters import eagle3_folder, target
from engine.tiny import llama
from models.tiny_tokenizers import byte_level

WHOLE = LoadOptions(pack=False, weights="float32")


@pytest.fixture
def folder(tmp_path):
    llama().save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_a_whole_checkpoint_is_loaded_as_it_is(folder):
    model, _ = load_model(folder, WHOLE)
    loaded, wanted = model.state_dict(), llama().state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize(
    ("change", "message"),
    ids=["missing", "misshapen"],
    argvalues=[
        (
            lambda t: {name: weight for name, weight in t.items() if name != "model.norm.weight"},
            r"not a whole Llama.*: tensor 'model\.norm\.weight', of shape \[16\] in the model, is missing \(1 such\)",
        ),
        (
            lambda t: t | {"model.norm.weight": torch.ones(3)},
            r"tensor 'model\.norm\.weight', of shape \[16\] in the model, has shape \[3\] \(1 such\)\. Get",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(change, message, folder):
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        dp.load(folder, None)
    with pytest.raises(ValueError, match=message):
        dp.load(llama(), folder)


def test_a_truncated_file_is_refused_with_the_name_of_the_model(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"the weights of '{folder}' cannot be read: .* get it again"):
        dp.load(folder, None)


def test_a_head_that_does_not_say_so_is_not_half_loaded_as_a_draft_model(tmp_path):
    path = eagle3_folder(tmp_path, "midlayer") / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]}
    del config["draft_vocab_size"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"\(11 such\)\. .* published drafter, .* as in 'eagle3:name'"):
        dp.load(target(), tmp_path)
