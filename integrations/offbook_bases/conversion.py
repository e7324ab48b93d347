"""From a GGUF file to a Hugging Face folder. One part of a tensor is in memory at a time."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from offbook.base.errors import ConfigError
from offbook.base.types import Json

from .architectures import Architecture, read_architecture
from .gguf_file import Bytes, Floats, GgufFile
from .vocabulary import check_round_trip, check_template, read_tokenizer, read_vocabulary

LARGE = 10**9
"""Parameters from which weights are written as bfloat16: half the disk, and what a GPU computes in."""
_PART = 2**22
"""Values dequantised at a time: 16 MiB as float32."""


def convert(source: Path, folder: Path, original: Path | None) -> dict[str, Json]:
    """Write a model's folder, and return the facts for its note. `original`: a tokenizer.json that the tokenizer must equal.

    Raises ConfigError for a file that is damaged or not supported, and OSError."""
    file = GgufFile(source)
    architecture = read_architecture(file)
    config = architecture.config
    vocabulary = read_vocabulary(file, config["vocab_size"])
    check_round_trip(vocabulary.tokenizer, read_tokenizer(original) if original else None)
    if vocabulary.template is not None:
        check_template(vocabulary.template, vocabulary.tokenizer, vocabulary.special)
    dtype = "bfloat16" if architecture.parameters >= LARGE else "float32"
    ids: dict[str, Json] = {f"{name}_token_id": index for name, index in vocabulary.ids.items() if name != "unk"}
    ends = list(vocabulary.ends)
    files: dict[str, dict[str, Json]] = {
        "config.json": config | ids | {"dtype": dtype},
        "generation_config.json": ids | {"eos_token_id": ends if len(ends) > 1 else ends[0]},
        "tokenizer_config.json": vocabulary.config(config["max_position_embeddings"]),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    vocabulary.tokenizer.save(str(folder / "tokenizer.json"))
    write_weights(architecture, folder / "model.safetensors", dtype)
    values = Counter[str]()
    for weight in architecture.weights:
        values[weight.tensor.kind.name] += math.prod(weight.shape)
    return {
        "licence": file.text("general.license", "") or None,
        "quantisation": values.most_common(1)[0][0],
        "dtype": dtype,
        "parameters": architecture.parameters,
        "warning": None if vocabulary.template else "it has no chat template: put chat_template.jinja into its folder",
    }


def write_weights(architecture: Architecture, path: Path, dtype: str) -> None:
    """Write a safetensors file part by part. Its own library wants all tensors in memory.

    The format: https://github.com/huggingface/safetensors#format."""
    code, width = ("F32", 4) if dtype == "float32" else ("BF16", 2)
    header: dict[str, Json] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in architecture.weights:
        start, end = end, end + math.prod(weight.shape) * width
        header[weight.name] = {"dtype": code, "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if shutil.disk_usage(path.parent).free < end:
            raise ConfigError(
                f"{path.parent.parent} needs {end / 1e6:,.0f} MB of free disk: free some, or set OFFBOOK_BASES"
            )
        for weight in architecture.weights:
            rows = weight.tensor.raw.shape[0]
            step = max(1, _PART // weight.shape[-1])
            for start in range(0, rows, step):
                values = weight.part(start, min(start + step, rows))
                file.write((values if width == 4 else _bfloat16(values)).tobytes())


def _bfloat16(values: Floats) -> Bytes:
    """The upper halves of float32, rounded to the nearest even."""
    bits = values.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype("<u2").view(np.uint8)
