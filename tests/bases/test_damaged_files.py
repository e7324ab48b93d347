"""A GGUF file is read from strangers: whatever it holds, the reader ends with a ConfigError, quickly and in little memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from offbook.base.errors import ConfigError
from offbook_bases.architectures import read_architecture
from offbook_bases.conversion import convert
from offbook_bases.gguf_file import GgufFile
from offbook_bases.vocabulary import read_vocabulary

from .gguf_models import Source, make_source

HUGE = 2**63 - 1


@pytest.fixture(scope="module")
def source() -> Source:
    return make_source("llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def whole(source: Source, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return source.write(tmp_path_factory.mktemp("whole") / "model.gguf").read_bytes()


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        text(name)
        + struct.pack("<I", len(shape) if dimensions is None else dimensions)
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        GgufFile(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04", "does not begin with GGUF"),
        (header(version=1), "version is 1"),
        (header(version=3 << 24), "big-endian"),
        (header(tensors=HUGE), "tensors, and 10,000 are the limit"),
        (header(keys=HUGE), "keys, and 10,000 are the limit"),
        (header(keys=1) + struct.pack("<Q", HUGE), "it ends inside a key"),
        (header(keys=1) + text("a") + struct.pack("<I", 99), "a has the unknown type 99"),
        (header(keys=1) + text("a") + struct.pack("<IIQ", 9, 8, HUGE), "items of a, and 1,000,000 are the limit"),
        (header(keys=1) + text("a") + struct.pack("<IIQ", 9, 4, 999_999), "it ends inside a"),
        (header(keys=1) + text("a") + struct.pack("<IIQ", 9, 9, 1), "list of the type 9"),
        (header(keys=1) + text("a") + struct.pack("<IQ", 8, 2) + b"\xff\xff", "a is not UTF-8"),
        (header(keys=2) + 2 * (text("a") + struct.pack("<IB", 0, 1)), "the key a occurs twice"),
        (header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 33), "power of two"),
        (header(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0), "integer from 1 to 65,536"),
        (header(tensors=1) + tensor("t", (4,), dimensions=9), "9 dimensions"),
        (header(tensors=1) + tensor("t", (4, 0)), "has the shape"),
        (header(tensors=1) + tensor("t", (2**31,) * 2), "has the shape"),
        (header(tensors=1) + tensor("t", (2**30,) * 4), "it ends inside tensor t"),
        (header(tensors=1) + tensor("t", (4,), kind=4), "unknown type 4"),
        (header(tensors=1) + tensor("t", (33,), kind=2) + bytes(999), "no whole Q4_0 blocks"),
        (header(tensors=1) + tensor("t", (4,), offset=7) + bytes(999), "not aligned"),
        (header(tensors=1) + tensor("t", (4,), offset=HUGE & ~31) + bytes(999), "it ends inside tensor t"),
        (header(tensors=2) + tensor("t", (32,)) + tensor("u", (4,), offset=64) + bytes(999), "inside another"),
        (
            header(tensors=2) + tensor("t", (4,)) + tensor("t", (4,), offset=32) + bytes(999),
            "the tensor t occurs twice",
        ),
    ],
)
def test_a_wrong_header_is_refused_with_its_fault(content: bytes, why: str, tmp_path: Path) -> None:
    message = refused(tmp_path / "model.gguf", content)
    assert why in message and "model.gguf" in message


def test_a_file_that_is_cut_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    data = whole.index(b"output_norm.weight") + 200
    for end in (*range(4, data, 97), *range(data, len(whole) - 1, 9973), len(whole) - 1):
        refused(tmp_path / "model.gguf", whole[:end])


def test_flipped_bytes_are_refused_or_change_a_value_only(whole: bytes, tmp_path: Path) -> None:
    """Seeded: 600 files with one to eight wrong bytes in the header. No other error than ConfigError leaves the reader."""
    source, path = random.Random(0), tmp_path / "model.gguf"
    end = whole.index(b"output_norm.weight") + 64
    tracemalloc.start()
    for _ in range(600):
        content = bytearray(whole)
        for _ in range(source.randint(1, 8)):
            content[source.randrange(4, end)] = source.choice((0, 255, source.randrange(256)))
        path.write_bytes(content)
        try:
            file = GgufFile(path)
            architecture = read_architecture(file)
            read_vocabulary(file, architecture.config["vocab_size"])
        except ConfigError as error:
            assert str(error)
    assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("general.architecture", "gpt9", "'gpt9' is not supported: use one of llama, qwen2, qwen3, gemma3"),
        ("llama.block_count", 10**6, "must be an integer from 1 to 1,000"),
        ("llama.block_count", 2, "no tensor blk.1.attn_q.weight"),
        ("llama.embedding_length", 32, "its keys demand"),
        ("llama.embedding_length", "64", "llama.embedding_length is no integer"),
        ("llama.rope.freq_base", float("nan"), "finite number above 0"),
        ("llama.rope.scaling.type", "longrope", "no key llama.rope.scaling.factor"),
        ("llama.expert_count", 8, "meaning of 'llama.expert_count' is unknown"),
        ("llama.rope.dimension_count", 8, "16 values per head are supported only"),
        ("tokenizer.ggml.model", "bert", "tokenizer 'bert' is not supported"),
        ("tokenizer.ggml.pre", "falcon", "pre-tokenizer 'falcon' is not supported"),
        ("tokenizer.ggml.merges", ["a zz"], "names no tokens"),
        ("tokenizer.ggml.tokens", ["a", "a"], "1 of them different"),
        ("tokenizer.ggml.eos_token_id", 10**6, "must be an integer from 0 to"),
        ("tokenizer.chat_template", "{% for", "chat template cannot be rendered"),
        ("tokenizer.chat_template", "nothing", "leaves out the messages"),
        ("tokenizer.chat_template", "<|turn|>{{ messages }}", "'<|turn|>', which is no token"),
        ("tokenizer.chat_template", "{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
    ],
)
def test_keys_that_do_not_fit_are_named(source: Source, key: str, value: object, why: str, tmp_path: Path) -> None:
    changed = Source(source.family, source.model, dict(source.keys), source.tensors)
    if key == "general.architecture":
        changed.family = str(value)
    else:
        changed.keys[key] = value
    if key == "tokenizer.ggml.tokens":
        changed.keys["tokenizer.ggml.token_type"] = [1, 1]
    with pytest.raises(ConfigError) as caught:
        convert(changed.write(tmp_path / "model.gguf"), tmp_path, None)
    assert why in str(caught.value)


def test_weights_that_are_no_numbers_and_tensors_without_a_place_are_refused(source: Source, tmp_path: Path) -> None:
    broken = source.tensors | {"output_norm.weight": np.full(64, np.nan, np.float32)}
    with pytest.raises(ConfigError, match=r"output_norm.weight: it holds NaN"):
        convert(Source("llama", source.model, source.keys, broken).write(tmp_path / "model.gguf"), tmp_path, None)
    more = source.tensors | {"blk.0.ffn_gate_inp.weight": np.zeros(4, np.float32)}
    with pytest.raises(ConfigError, match=r"ffn_gate_inp.weight' has no place"):
        convert(Source("llama", source.model, source.keys, more).write(tmp_path / "other.gguf"), tmp_path, None)
