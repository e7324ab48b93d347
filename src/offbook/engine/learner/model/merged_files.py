# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers builds its classes at run time and carries partial types.
"""The files of a merged model beside its weights, and the load that shows that other tools can use the folder.

A merged model has its base's own files for texts, images and videos, unchanged: what loads the base loads the model. For
llama.cpp's converter, the configuration also has the precision and RoPE's parameters under their old names, and the
tokenizer's settings have the chat template, where older versions of the converter read them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from offbook.base.errors import EngineError
from offbook.base.json_files import read_json
from offbook.base.types import Json
from offbook.engine.base_weights import architecture_of, check_weights

_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja")
"""Files of tokenizers, processors and chat templates; what a base's folder has besides is weights, code or for people."""
_OWN = ("config.json", "params.json")
"""The model's own configuration, and Mistral's for weights under other names, which a merged model does not have."""
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_SAMPLE = "Hello, world! 1 + 1 = 2"
_TOLERANCE = 0.05
"""Largest relative difference of the loaded model's logits: far above rounding, far below a layer that is missing."""


def copy_files(base: Path, folder: Path) -> None:
    """Copy the base's files for texts, images and videos to the merged model's `folder`. Raises OSError."""
    for file in (file for pattern in _PATTERNS for file in base.glob(pattern) if file.is_file()):
        if file.name not in _OWN and not file.name.endswith(".index.json"):
            target = folder / file.relative_to(base)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def make_ready(folder: Path) -> None:
    """Rewrite the settings of the merged model in `folder` for llama.cpp's converter. Raises OSError."""
    config = read_json(folder / "config.json")
    dtype = config.get("dtype") or config.get("torch_dtype")
    _write(folder / "config.json", _with_old_rope_names(config | {"dtype": dtype, "torch_dtype": dtype}))
    settings, template = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    if template.exists():
        content = read_json(settings) if settings.exists() else {}
        _write(settings, content | {"chat_template": template.read_text("utf-8")})


def check(folder: Path, base: Path, expected: Tensor, dtype: torch.dtype) -> str:
    """Load the merged model in `folder` as other tools do, and compare it with the one in memory, whose logits after the
    tokens of `probe_ids` are `expected`. Returns what was compared. Raises EngineError, ConfigError for the weights."""
    try:
        check_weights(folder)
        tokenizer, own = (AutoTokenizer.from_pretrained(place, trust_remote_code=False) for place in (folder, base))
        if tokenizer.chat_template != own.chat_template or tokenizer.encode(_SAMPLE) != own.encode(_SAMPLE):
            raise EngineError("the merged model's tokenizer is not the base's")
        processor = _compare_processors(folder, base)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = architecture_of(config).from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the merged model does not load: {type(error).__name__}: {error}") from error
    difference = float((logits(model, base) - expected).norm() / expected.norm().clamp_min(1e-12))
    if not difference < _TOLERANCE:  # also for NaN
        raise EngineError(f"the merged model's files give other logits than the model: {difference:.2g} of their size")
    return f"configuration, every weight, tokenizer{processor} and the logits after one token"


def logits(model: Any, base: Path) -> Tensor:
    """The logits of a model after the first token of a sample text, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    ids: list[int] = tokenizer.encode(_SAMPLE, add_special_tokens=False)[:1] or [0]
    with torch.inference_mode():
        return model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].float()


def _compare_processors(folder: Path, base: Path) -> str:
    """Load the processor of a base with one, from both folders. Returns `, processor`, or why this machine cannot; empty
    for a base without one. Raises EngineError if the base's loads and the model's does not."""
    if not any((base / name).is_file() for name in _PROCESSOR_FILES):
        return ""
    faults: list[str] = []
    for place in (base, folder):
        try:
            AutoProcessor.from_pretrained(place, trust_remote_code=False)
        except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            faults.append((str(error).strip().splitlines() or [type(error).__name__])[0])
        else:
            faults.append("")
    if faults[1] and not faults[0]:
        raise EngineError(f"the merged model's processor does not load: {faults[1]}")
    return f" (not the processor: {faults[0]})" if faults[0] else ", processor"


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


def _write(file: Path, content: dict[str, Json]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
