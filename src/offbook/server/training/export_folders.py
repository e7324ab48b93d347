"""Exports of checkpoints as folders, in the formats of `ExportFormat`.

A merged model for llama.cpp's converter has 16-bit weights, the base's tokenizer files, and a configuration with the
precision and RoPE's parameters under their old names too, which older versions of the converter read.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  # it leaves the type of paths open

from offbook.base.json_files import read_json
from offbook.base.types import Json, new_id
from offbook.base.wire import ExportFormat

from ...engine.checkpoint_files import Checkpoint
from ..errors import ApiError
from ..models.checkpoints import export_adapter

LARGEST = 65_504.0
"""Largest finite value of float16."""
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
    """Rewrite the merged model in `folder`, whose base model is in the folder `base`.

    float32 weights become float16; bfloat16 stays. Raises ValueError for a weight that float16 cannot hold, and
    OSError.
    """
    config = _read(folder / "config.json")
    dtype = config.pop("torch_dtype", None) or config.get("dtype")
    if dtype == "float32":
        dtype = "float16"
        sizes = [_to_float16(file) for file in sorted(folder.glob("*.safetensors"))]
        index = folder / "model.safetensors.index.json"
        if index.exists():
            content = _read(index)
            content["metadata"] = {**content.get("metadata", {}), "total_size": sum(sizes)}
            _write(index, content)
    _write(folder / "config.json", _with_old_rope_names(config | {"dtype": dtype, "torch_dtype": dtype}))
    _copy_tokenizer(base, folder)


def _to_float16(file: Path) -> int:
    """Convert the float32 weights of a file to float16. Returns the size of all its weights in bytes."""
    weights = load_file(file)
    for name, weight in weights.items():
        if weight.dtype == np.float32:
            if not np.abs(weight).max(initial=0.0) <= LARGEST:
                raise ValueError(
                    f"{name} has values beyond float16's {LARGEST:g} (or NaN): export with format merged, and convert "
                    "to bf16 or f32"
                )
            weights[name] = weight.astype(np.float16)
    scratch = file.with_suffix(".part")
    save_file(weights, scratch, metadata={"format": "pt"})
    scratch.replace(file)
    return sum(weight.nbytes for weight in weights.values())


def _with_old_rope_names(config: dict[str, Json]) -> dict[str, Json]:
    """The configuration with `rope_theta` and `rope_scaling` beside transformers 5's `rope_parameters`.

    Older readers ignore `rope_parameters` and would silently use their default. Settings per kind of layer have no
    old form, so they are left as they are.

    >>> config = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
    >>> _with_old_rope_names(config)["rope_scaling"]
    {'rope_type': 'linear', 'factor': 2.0}
    """
    rope: dict[str, Json] = config.get("rope_parameters") or {}
    if "rope_theta" not in rope:  # no RoPE, or one set of parameters per kind of layer
        return config
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    scaled = scaling.get("rope_type", "default") != "default"
    return config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling if scaled else None}


def _copy_tokenizer(base: Path, folder: Path) -> None:
    """Copy the base's tokenizer files unchanged: the converter recognises tokenizers by their behaviour.

    The chat template is also written to tokenizer_config.json, where older readers look for it.
    """
    for name in _TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    config, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    settings = _read(config) if config.exists() else {}
    if template.exists():
        _write(config, settings | {"chat_template": template.read_text("utf-8")})


def _read(file: Path) -> dict[str, Json]:
    return read_json(file)


def _write(file: Path, content: dict[str, Json]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


Merge = Callable[[Checkpoint, Path], Awaitable[None]]
"""Function that writes base and LoRA as one model to a new folder. Raises EngineError."""


async def write_export(
    checkpoint: Checkpoint, format: ExportFormat, output: Path, *, base: Path, reference: str, merge: Merge
) -> None:
    """Write a checkpoint to the new folder `output`, atomically.

    `base`: folder of the base model. `reference`: the `base_model_name_or_path` of a `peft` export. Raises ApiError
    409 for weights that float16 cannot hold, EngineError if merging fails, and OSError.
    """
    if format == "peft":
        await asyncio.to_thread(export_adapter, checkpoint, output, reference)
    elif format == "merged":
        await merge(checkpoint, output)
    else:
        await _gguf_ready(checkpoint, output, base, merge)


def new_folder(output: str) -> Path:
    """Check the folder that a request names. Raises ApiError 400 for a relative path and 409 for an existing one."""
    path = Path(output)
    if output.startswith("~/"):
        path = path.expanduser()
    if not path.is_absolute() or "\0" in output:
        raise ApiError(400, f"output must be an absolute path on the server's machine, got {output!r}", "output")
    try:
        exists = path.exists()
    except OSError as error:
        raise ApiError(
            400, f"output {output!r} cannot be a folder: {error.strerror}", "output", "invalid_value"
        ) from error
    if exists:
        raise ApiError(409, f"output {path} exists already; name a new folder", "output", "output_exists")
    return path


async def _gguf_ready(checkpoint: Checkpoint, output: Path, base: Path, merge: Merge) -> None:
    """Merge beside `output`, convert for llama.cpp, and rename to `output`."""
    scratch = output.with_name(f".{output.name}.{new_id('gguf')}")
    try:
        await merge(checkpoint, scratch)
        await asyncio.to_thread(make_ready, scratch, base)
        scratch.rename(output)
    except ValueError as error:
        raise ApiError(409, f"{checkpoint.path} cannot be exported: {error}", "format", "beyond_float16") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # already renamed, or incomplete
