"""GGUF files: values and groups by the definition of each type, and errors, never crashes, for damaged files."""

import struct

import numpy as np
import pytest

from draftproof.models.gguf import Gguf
from models.gguf_files import gguf_bytes, random_blocks, value_of

SHAPE = (6, 512)
METADATA = {"general.architecture": "llama", "llama.block_count": 3, "eps": 1e-5, "tokens": ["a", "Ġb", "ü"]}


def written(path, kind="Q4_1", shape=SHAPE):
    rng = np.random.default_rng(0)
    content = random_blocks(kind, shape, rng)
    norm = rng.normal(size=32).astype(np.float32)
    tensors = {"norm": ("F32", (32,), norm.tobytes()), "matrix": (kind, shape, content)}
    path.write_bytes(gguf_bytes(METADATA, tensors))
    return content, norm


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q4_K"])
def test_values_are_those_of_the_definition(tmp_path, kind):
    content, norm = written(tmp_path / "m.gguf", kind)
    gguf = Gguf(tmp_path / "m.gguf")
    assert gguf.metadata == {**METADATA, "eps": pytest.approx(1e-5)}
    assert gguf.names == ["norm", "matrix"]
    assert np.array_equal(gguf.tensor("norm"), norm)
    found = gguf.tensor("matrix")
    expected = np.array([value_of(kind, content, i) for i in range(found.size)]).reshape(SHAPE)
    assert found.shape == SHAPE
    # The products are exact in float64 and rounded at most twice in float32.
    assert np.allclose(found, expected, rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_groups_are_the_values(tmp_path, kind):
    written(tmp_path / "m.gguf", kind)
    gguf = Gguf(tmp_path / "m.gguf")
    codes, scale, minimum = gguf.groups("matrix")
    assert codes.max() <= 15
    whole = (codes.reshape(6, -1, 32) * scale[..., None] + minimum[..., None]).reshape(SHAPE)
    assert np.array_equal(whole.astype(np.float32), gguf.tensor("matrix"))


def test_other_types_have_no_groups_of_four_bits(tmp_path):
    written(tmp_path / "m.gguf", "Q8_0")
    assert Gguf(tmp_path / "m.gguf").groups("matrix") is None
    assert Gguf(tmp_path / "m.gguf").groups("norm") is None


def read_everything(path):
    gguf = Gguf(path)
    for name in gguf.names:
        gguf.tensor(name)
        gguf.groups(name)


def test_damaged_files_end_in_an_error_or_are_read(tmp_path):
    """Flip bytes of the header at random, and cut the file at every place of it: nothing but a `ValueError` comes."""
    path = tmp_path / "m.gguf"
    written(path)
    whole, rng, refused = path.read_bytes(), np.random.default_rng(1), 0
    header = whole.index(b"matrix") + 40
    cut = [whole[:n] for n in range(1, header, 3)]
    flipped = []
    for _ in range(600):
        content = bytearray(whole)
        for at in rng.integers(4, header, size=rng.integers(1, 4)):
            content[at] = rng.integers(256)
        flipped.append(bytes(content))
    for content in cut + flipped:
        path.write_bytes(content)
        try:
            read_everything(path)
        except ValueError:
            refused += 1
    assert refused > len(cut) + 100  # the rest changed a name, a number or nothing


@pytest.mark.parametrize(
    ("at", "content", "message"),
    [
        (4, struct.pack("<I", 2), "expected a GGUF file of version 3"),
        (8, struct.pack("<Q", 2**60), "damaged"),
        (16, struct.pack("<Q", 2**60), "damaged"),
        (24, struct.pack("<Q", 2**62), "a string of 4611686018427387904 bytes"),
    ],
)
def test_wrong_counts_are_named(tmp_path, at, content, message):
    path = tmp_path / "m.gguf"
    written(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + content + whole[at + len(content) :])
    with pytest.raises(ValueError, match=message):
        Gguf(path)


def test_arrays_of_arrays_without_end_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    nested = struct.pack("<IQ", 9, 1) * 5000
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + nested
    )
    with pytest.raises(ValueError, match="an array of 1 values at depth 4"):
        Gguf(path)


def test_what_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    written(path)
    whole = path.read_bytes()
    info = whole.index(b"matrix") + 6 + 4 + 16
    path.write_bytes(whole[:info] + struct.pack("<I", 99) + whole[info + 4 :])
    with pytest.raises(ValueError, match=r"GGML type 99; this reader knows F32, F16, Q4_0, Q4_1, Q8_0, Q4_K"):
        Gguf(path).tensor("matrix")
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"tensor matrix ends at byte \d+ and m.gguf has \d+"):
        Gguf(path).tensor("matrix")
    odd = gguf_bytes({}, {"matrix": ("Q4_1", (2, 48), bytes(60))})
    path.write_bytes(odd)
    with pytest.raises(ValueError, match=r"shape \(2, 48\); Q4_1 has blocks of 32"):
        Gguf(path).tensor("matrix")
