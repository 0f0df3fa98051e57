"""Write small GGUF files for tests, by the format's definition and without draftproof's code."""

import struct

import numpy as np

KINDS = {"F32": 0, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12}
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34, "Q4_K": 144}
BLOCK_VALUES = {"Q4_0": 32, "Q4_1": 32, "Q8_0": 32, "Q4_K": 256}


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key, value):
    """Write a metadata entry: a float, an int, a string, or a list of strings."""
    if isinstance(value, list):
        return string(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
    if isinstance(value, str):
        return string(key) + struct.pack("<I", 8) + string(value)
    if isinstance(value, float):
        return string(key) + struct.pack("<If", 6, value)
    return string(key) + struct.pack("<II", 4, value)


def gguf_bytes(metadata, tensors):
    """Return a file with this metadata and these tensors: name → (type, shape, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(entry(key, value) for key, value in metadata.items())
    body = b""
    for name, (kind, shape, content) in tensors.items():
        head += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", KINDS[kind], len(body))
        body += content + bytes(-len(content) % 32)
    return head + bytes(-len(head) % 32) + body


def random_blocks(kind, shape, rng):
    """Return the bytes of a matrix of random blocks whose scales and minima are small, finite numbers."""
    count = int(np.prod(shape)) // BLOCK_VALUES[kind]
    blocks = rng.integers(256, size=(count, BLOCK_BYTES[kind]), dtype=np.uint8)
    numbers = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1, "Q4_K": 2}[kind]
    small = rng.normal(0, 0.02, size=(count, numbers)).astype(np.float16)
    blocks[:, : 2 * numbers] = small.view(np.uint8)
    return blocks.tobytes()


def value_of(kind, content, index):
    """Return one value of a tensor, in float64, by the definition of its type."""
    size, block = BLOCK_BYTES[kind], BLOCK_VALUES[kind]
    raw, i = content[index // block * size :][:size], index % block
    d = float(np.frombuffer(raw[:2], "<f2")[0])
    if kind == "Q8_0":
        return d * struct.unpack("b", raw[2 + i : 3 + i])[0]
    if kind == "Q4_0":
        return d * (_nibble(raw[2:], i) - 8)
    m = float(np.frombuffer(raw[2:4], "<f2")[0])
    if kind == "Q4_1":
        return d * _nibble(raw[4:], i) + m
    scales, codes, j = raw[4:16], raw[16:], i // 32  # Q4_K, as ggml's get_scale_min_k4 reads it
    if j < 4:
        scale, minimum = scales[j] & 63, scales[j + 4] & 63
    else:
        scale = scales[j + 4] & 0xF | (scales[j - 4] >> 6) << 4
        minimum = scales[j + 4] >> 4 | (scales[j] >> 6) << 4
    byte = codes[i // 64 * 32 + i % 32]
    return d * scale * (byte & 15 if i % 64 < 32 else byte >> 4) - m * minimum


def _nibble(codes, i):
    return codes[i] & 15 if i < 16 else codes[i - 16] >> 4
