"""What a base's folder says: its attention and its weight files, which are checked against its architecture before an engine loads
them. Reads only the files' headers.

transformers fills a weight that the files lack with random numbers, and vLLM leaves it as the memory was if the layers
that it fuses have another. Sampler and learner would then be different policies."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers' models and configs are only partly typed.

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json

from .precision import device_name

_SHOWN = 5
"""Names of weights in a message."""
_LOADABLE = frozenset({"bitsandbytes", "mxfp4"})
"""Quantizations that transformers loads for training with what the package installs."""


def check_weights(folder: Path, *, any_quantization: bool = False) -> None:
    """Check that the files have every weight of the architecture in its shape; tied weights may be absent.

    Of quantized files, shapes are not compared, and names only if they are bitsandbytes'. `any_quantization`: the engine
    loads files of every quantization. Raises ConfigError, which names the file or the weights, and OSError or ValueError
    if transformers does not know the architecture."""
    shapes = _read_headers(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    stored: dict[str, Any] | None = getattr(config, "quantization_config", None)
    quantization = None if stored is None else str(stored.get("quant_method", "by an unknown method"))
    if quantization not in (None, *_LOADABLE) and not any_quantization:
        raise ConfigError(
            f"--model {folder}: the base is quantized ({quantization}), and neither the learner nor the embedded "
            "engine can use such weights: use the original weights (--load-in-4bit quantizes them for the learner). To "
            "sample this base without training, use --engine vllm --inference-only"
        )
    if quantization not in (None, "bitsandbytes"):
        return
    architecture = architecture_of(config)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of missing weights says that they were newly initialized
    try:
        _, report = architecture.from_pretrained(
            None,
            config=config,
            state_dict=shapes,
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    finally:
        logging.set_verbosity(verbosity)
    wrong = [
        f"{name} ({_shape(in_file)} in the files, {_shape(expected)} by config.json)"
        for name, in_file, expected in sorted(report["mismatched_keys"])
    ]
    if wrong and quantization is None:
        raise ConfigError(
            f"--model {folder}: weights have other shapes than config.json says: {_listed(wrong)}. Correct config.json "
            "(vocab_size, if these are the embeddings), or download the model again"
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"--model {folder}: the files lack weights of {architecture.__name__}, which would be random numbers: "
            f"{_listed(missing)}. {_remedy(missing, config)}"
        )


def architecture_of(config: PreTrainedConfig) -> Any:
    """transformers' class for a base. A base with a vision tower is loaded whole, as vLLM loads it, because the names of
    its layers, and so those of adapters, are others in the class of its text part. Raises ValueError if there is none."""
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(f"transformers has no language model of type {config.model_type!r}")


def _read_headers(folder: Path) -> dict[str, Tensor]:
    """Tensors without content, by name, from the files that transformers would load."""
    shapes: dict[str, Tensor] = {}
    for file in _files(folder):
        try:
            with safe_open(file, "pt") as content:
                names: list[str] = content.keys()
                shapes |= {name: torch.empty(content.get_slice(name).get_shape(), device="meta") for name in names}
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"--model {folder}: {file.name} is missing or cut off ({error}): download the model again"
            ) from error
    return shapes


def _files(folder: Path) -> list[Path]:
    whole, index = folder / SAFE_WEIGHTS_NAME, folder / SAFE_WEIGHTS_INDEX_NAME
    if whole.is_file() or not index.is_file():
        return [whole]
    try:
        names: Iterable[str] = read_json(index)["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model {folder}: {index.name} cannot be read ({error!r}): download it again") from error
    return [folder / name for name in sorted(set(names))]


def _remedy(missing: list[str], config: PreTrainedConfig) -> str:
    if missing == ["lm_head.weight"] and not getattr(config.get_text_config(), "tie_word_embeddings", False):
        return "If its output layer is the embedding, set tie_word_embeddings to true in config.json; else download it again"
    return "Download the model again, or save it whole"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _shape(size: Iterable[int]) -> str:
    return " x ".join(map(str, size))


def main() -> int:
    """`python -m offbook.engine.base_model DIR [--cuda]`: the check for vLLM. Exit code 2, with the reason on stderr,
    for a base that must not be loaded, and with --cuda for a GPU that torch cannot use. vLLM also knows architectures
    that transformers does not; those are not checked."""
    try:
        if "--cuda" in sys.argv[2:]:
            device_name("cuda")
        check_weights(Path(sys.argv[1]), any_quantization=True)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"The names of the base's weights were not checked: {error}", file=sys.stderr)
    return 0


UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments by which transformers tells an attention function of capped scores, sinks and biases. None of ours, and not SDPA,
computes them."""


@dataclass(frozen=True)
class AttentionSize:
    """The sizes of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int


def attention_sizes(config: PreTrainedConfig) -> tuple[AttentionSize, ...]:
    """The different sizes among the layers of a text model, in their order. Gemma 4's full and sliding layers differ."""
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    return tuple(dict.fromkeys(_attention_size(layer) for layer in layers))


def _attention_size(config: PreTrainedConfig) -> AttentionSize:
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return AttentionSize(heads, int(getattr(config, "num_key_value_heads", None) or heads), int(width))


if __name__ == "__main__":
    sys.exit(main())
