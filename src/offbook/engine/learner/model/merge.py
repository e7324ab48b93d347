# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers and peft carry partial types
"""Merges a base model and an adapter into one plain model folder, and loads it once, which shows that other tools can use it.

A merged model has its base's own files for texts, images and videos, unchanged: what loads the base loads the model. For
llama.cpp's converter, the configuration also has the precision and RoPE's parameters under their old names, and the
tokenizer's settings have the chat template, where older versions of the converter read them."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from offbook.base.errors import ConfigError, EngineError
from offbook.base.json_files import read_json
from offbook.base.types import Json
from offbook.base.wire import KEPT_WELL
from offbook.engine.base_model import architecture_of, check_weights
from offbook.engine.precision import device_name, dtype_of
from offbook.engine.protocol import Merged

LARGEST = torch.finfo(torch.float16).max
GENERATION = "generation_config.json"


def merge(
    base: Path, adapter: Path, output: Path, dtype: torch.dtype, *, gguf: bool = False, request_id: str = ""
) -> Merged:
    """Write the merged model to the new folder `output`, with the base's files for texts and images, and load it once.

    The folder is written under another name and renamed, so it is never incomplete. A copy of the base is loaded on the
    CPU in `dtype`, so a learner's weights stay unchanged. `gguf`: for llama.cpp's converter; float32 becomes float16.
    Raises ConfigError if `output` exists or float16 cannot hold a weight, EngineError if it does not load, OSError."""
    if output.exists():
        raise ConfigError(f"output: {output} exists already; name a new folder")
    check_weights(base)
    architecture = architecture_of(AutoConfig.from_pretrained(base, trust_remote_code=False))
    model = PeftModel.from_pretrained(
        architecture.from_pretrained(base, dtype=dtype, trust_remote_code=False), str(adapter)
    )
    rounding = Rounding(model, torch.float16 if gguf and dtype == torch.float32 else dtype)
    merged: Any = model.merge_and_unload()  # pyright: ignore[reportCallIssue]  # PEFT types it as a Tensor
    expected = logits(merged, base)
    if rounding.stored != dtype:
        _check_range(merged)
        merged.to(rounding.stored)
    if (base / GENERATION).is_file():
        merged.generation_config = GenerationConfig()  # the base's own is copied; some are refused when they are saved
    scratch = output.with_name(f".{output.name}.part-{os.getpid()}")
    try:
        merged.save_pretrained(scratch)
        del model, merged
        gc.collect()  # PEFT's layers refer to themselves: the next load would come on top of them
        copy_files(base, scratch)
        if gguf:
            make_ready(scratch)
        loaded = check(scratch, base, expected, dtype)
        os.rename(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # already renamed, or half written and of no use
    note = f"{rounding.describe()}. Loaded once and compared: {loaded}"
    return Merged(request_id=request_id, path=output, adapter_kept=rounding.kept, note=note)


class Rounding:
    """Measures, while the adapter of `model` is merged, how much of it the precision of the stored weights leaves.

    `kept`: the correlation of the weights' change with the adapter's, over all layers: 1 where nothing is lost. bfloat16
    has 8 bits of precision, so a change below 1/512 of a weight is mostly rounded away."""

    def __init__(self, model: nn.Module, stored: torch.dtype) -> None:
        self.stored = stored
        self._product = self._adapter = self._change = 0.0
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                setattr(layer, "merge", partial(self._merge, layer, layer.merge))  # noqa: B010  # PEFT's own method

    @property
    def kept(self) -> float:
        """The correlation so far; 1 for an adapter without a change."""
        size = (self._adapter * self._change) ** 0.5
        return min(1.0, self._product / size) if size else float(self._adapter == 0)

    def describe(self) -> str:
        """The precision, how much of the adapter it leaves, and what to do if that is little."""
        precision = str(self.stored).removeprefix("torch.")
        text = f"In {precision}, the weights' change has a correlation of {self.kept:.2f} with the adapter"
        if self.kept >= KEPT_WELL:
            return text
        return (
            f"{text}: rounding took the rest, as it does after few or small steps, so this model is not the one that was "
            "trained. Export the adapter (format peft), which loses nothing, or merge in float32 (format merged, a server "
            "with --dtype float32)"
        )

    def _merge(self, layer: Any, merge: Callable[..., None], *arguments: Any, **options: Any) -> None:
        weight: Tensor = layer.get_base_layer().weight
        before = weight.detach().to(self.stored, copy=True)
        merge(*arguments, **options)
        for name in layer.merged_adapters:
            adapter = layer.get_delta_weight(name).detach().float()
            change = weight.detach().to(self.stored).float() - before.float()
            self._product += float((adapter * change).sum(dtype=torch.float64))
            self._adapter += float(adapter.square().sum(dtype=torch.float64))
            self._change += float(change.square().sum(dtype=torch.float64))


def _check_range(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if not float(weight.detach().abs().max()) <= LARGEST:
            raise ConfigError(
                f"{name} has values beyond float16's {LARGEST:g} (or NaN): export with format merged, and convert "
                "to bf16 or f32"
            )


def main() -> int:
    """`python -m offbook.engine.learner.model.merge`: merge in the precision that a learner would have on this machine.
    Writes a Merged to stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m offbook.engine.learner.model.merge", description="Base plus adapter."
    )
    for name in ("--base", "--adapter", "--output"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--gguf", action="store_true", help="for llama.cpp's converter")
    arguments = parser.parse_args()
    dtype = dtype_of("auto", device_name("auto"))
    try:
        merged = merge(arguments.base, arguments.adapter, arguments.output, dtype, gguf=arguments.gguf)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(merged.model_dump_json())
    return 0


_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "additional_chat_templates/*.jinja")
"""Files of tokenizers, processors and chat templates; what a base's folder has besides is weights, code or for people."""
_OWN = ("config.json", "params.json")
"""The model's own configuration, and Mistral's for weights under other names, which a merged model does not have."""
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
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = architecture_of(config).from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the merged model does not load: {type(error).__name__}: {error}") from error
    difference = float((logits(model, base) - expected).norm() / expected.norm().clamp_min(1e-12))
    if not difference < _TOLERANCE:  # also for NaN
        raise EngineError(f"the merged model's files give other logits than the model: {difference:.2g} of their size")
    return "configuration, every weight, tokenizer and the logits after one token"


def logits(model: Any, base: Path) -> Tensor:
    """The logits of a model after the first token of a sample text, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    ids: list[int] = tokenizer.encode(_SAMPLE, add_special_tokens=False)[:1] or [0]
    with torch.inference_mode():
        return model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].float()


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


if __name__ == "__main__":
    sys.exit(main())
