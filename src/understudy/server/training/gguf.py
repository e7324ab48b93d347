"""A merged folder as llama.cpp's converter reads it, also an older one: 16-bit weights, the base's own tokenizer files,
and a configuration that says the precision and RoPE's numbers where they have always been."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  # it leaves the type of paths open

from ...types import Json

LARGEST = 65_504.0
"""Of float16."""
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def make_ready(folder: Path, base: Path) -> None:
    """Rewrite the merged model in `folder`, whose base is in `base`. Float32 becomes float16; bfloat16 stays. Raises
    ValueError for a weight that float16 cannot hold, OSError."""
    config = _read(folder / "config.json")
    dtype = config.pop("torch_dtype", None) or config.get("dtype")
    if dtype == "float32":
        dtype = "float16"
        sizes = [_halve(file) for file in sorted(folder.glob("*.safetensors"))]
        index = folder / "model.safetensors.index.json"
        if index.exists():
            content = _read(index)
            content["metadata"] = {**content.get("metadata", {}), "total_size": sum(sizes)}
            _write(index, content)
    _write(folder / "config.json", _plain(config | {"dtype": dtype, "torch_dtype": dtype}))
    _take_tokenizer(base, folder)


def _halve(file: Path) -> int:
    """Float32 weights as float16; the bytes of all weights."""
    weights = load_file(file)
    for name, weight in weights.items():
        if weight.dtype == np.float32:
            if not np.abs(weight).max(initial=0.0) <= LARGEST:
                raise ValueError(
                    f"{name} has values beyond float16 (or NaN): export merged, and convert to bf16 or f32"
                )
            weights[name] = weight.astype(np.float16)
    scratch = file.with_suffix(".part")
    save_file(weights, scratch, metadata={"format": "pt"})
    scratch.replace(file)
    return sum(weight.nbytes for weight in weights.values())


def _plain(config: dict[str, Json]) -> dict[str, Json]:
    """transformers 5 writes RoPE's numbers as `rope_parameters`; a reader that does not know it takes its default."""
    rope: dict[str, Json] = config.get("rope_parameters") or {}
    if "rope_theta" not in rope:  # none, or one set per kind of layer: that needs a reader that knows it
        return config
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if scaled else None}


def _take_tokenizer(base: Path, folder: Path) -> None:
    """The base's files, byte for byte, as the converter knows tokenizers by what they do; the chat template also where
    older readers look for it."""
    for name in _TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    config, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = _read(config) if config.exists() else {}
    if template.exists():
        _write(config, settings | {"chat_template": template.read_text("utf-8")})


def _read(file: Path) -> dict[str, Json]:
    return json.loads(file.read_text("utf-8"))


def _write(file: Path, content: dict[str, Json]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
