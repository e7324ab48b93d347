# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers and peft build their classes at run time and carry partial types.
"""Loads the frozen base with transformers or Unsloth, in full precision or 4 bits, checks its architecture, and finds the layers that
an adapter can have: linear ones that PEFT, vLLM and we call by the same names."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]  # torch has no other name of the kind
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel

from offbook.base.errors import ConfigError
from offbook.engine.base_model import architecture_of, check_weights

from . import attention, unsloth_loader
from .target_logprobs import capped

Loader = Literal["peft", "unsloth"]
_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier")
"""Factors of the logits in transformers' configs, of Granite, Cohere, Falcon H1 and Muse."""


def load_base(base: Path, loader: Loader, device: str, dtype: torch.dtype, *, four_bit: bool) -> PreTrainedModel:
    """Load the base in folder `base`, ready for an adapter. Raises ConfigError, OSError."""
    if four_bit:
        _check_four_bit(device, dtype)
    _check_logits(AutoConfig.from_pretrained(base, trust_remote_code=False))
    check_weights(base)
    attention.register()
    kind = _attention_name(base, loader)
    try:
        if loader == "unsloth":
            longest = int(
                AutoConfig.from_pretrained(base, trust_remote_code=False).get_text_config().max_position_embeddings
            )
            model = unsloth_loader.load(base, device, dtype, kind, longest, four_bit=four_bit)
        else:
            model = _with_transformers(base, device, dtype, kind, four_bit=four_bit)
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        if not four_bit or isinstance(error, torch.OutOfMemoryError | ConfigError):
            raise
        raise _no_four_bit(device, str(error)) from error
    if four_bit and not getattr(model, "is_loaded_in_4bit", False):
        raise _no_four_bit(device, f"{loader} loaded it in {model.dtype} instead")
    if model.dtype != dtype and not four_bit:
        raise ConfigError(
            f"dtype: {loader} loaded the base in {_short(model.dtype)}, not in {_short(dtype)}: give --dtype "
            f"{_short(model.dtype)}, so that the sampler has the same, or take another --loader"
        )
    check_head(model)
    return model


def tree_refused(base: Path) -> str | None:
    """Why the architecture cannot train on trees, according to its configuration; None: nothing there forbids it."""
    whole = AutoConfig.from_pretrained(base, trust_remote_code=False)
    if _eager_only(whole):
        return f"the attention of {whole.model_type} has parts that only transformers' `eager` computes"
    config = whole.get_text_config()
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        return f"layers of type {', '.join(others)}: their state does not follow branches"
    return None


def sliding_window(config: PreTrainedConfig) -> int | None:
    """The sliding window of the text model's layers, or of some of them, in tokens; None: no layer has one."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True) if types is None else "sliding_attention" in types
    return int(window) if window and slides else None


def _eager_only(config: PreTrainedConfig) -> bool:
    """Whether SDPA does not compute the architecture's attention: transformers says so of gpt-oss, whose softmax has sinks,
    and not of Gemma 2, whose scores are capped."""
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return True
    return not architecture_of(config)._supports_sdpa  # pyright: ignore[reportPrivateUsage]  # no public name


def _attention_name(base: Path, loader: Loader) -> str:
    whole = AutoConfig.from_pretrained(base, trust_remote_code=False)
    if _eager_only(whole):
        return "eager"
    config = whole.get_text_config()
    if tree_refused(base) is not None:
        return "sdpa"
    if sliding_window(config) is None:
        return attention.NAME
    # Unsloth compiles windowed layers for the implementations it knows; Mistral's it replaces whatever the name.
    return "sdpa" if loader == "unsloth" else attention.WINDOWED


def attention_kind(model: PreTrainedModel) -> str:
    """The attention that the layers run: transformers' name of it, or `unsloth` if Unsloth replaced it."""
    own = [type(m).forward.__module__ for m in model.modules() if type(m).__name__.endswith("Attention")]
    if any(module.startswith("unsloth") for module in own):
        return "unsloth"
    return str(model.config.get_text_config()._attn_implementation)  # pyright: ignore[reportPrivateUsage]  # no public name


def logit_cap(config: PreTrainedConfig) -> float | None:
    """The bound to which the architecture caps its logits, as Gemma 2 and 4 do; None: it does not."""
    value = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return None if value is None else float(value)


def _check_logits(config: PreTrainedConfig) -> None:
    text = config.get_text_config()
    for name in _SCALES:
        if (value := getattr(text, name, None)) not in (None, 1):
            raise _transformed(config, f"scales its logits ({name} {value:g})")


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Check that logits are the output layer applied to the last hidden state, and capped if config.json says so, because
    training computes them only at targets. Raises ConfigError."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"base model {model.config.model_type!r}: its output layer is {type(head).__name__}, not Linear"
        )
    ids = torch.arange(4, device=head.weight.device)[None] % head.weight.shape[0]
    try:
        hidden = getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state
    except ValueError as error:  # of an attention that takes what ours does not compute
        raise ConfigError(f"base model {model.config.model_type!r}: {error}: choose another base model") from error
    expected = model(input_ids=ids, use_cache=False).logits
    computed = capped(head(hidden.to(head.weight.dtype)), logit_cap(model.config))
    if not torch.allclose(computed.to(head.weight.dtype), expected.to(head.weight.dtype), rtol=1e-3, atol=1e-3):
        raise _transformed(model.config, "transforms its logits")


def _transformed(config: PreTrainedConfig, what: str) -> ConfigError:
    return ConfigError(
        f"base model {config.model_type!r} {what}, which the learner does not reproduce: choose another base model"
    )


def _with_transformers(base: Path, device: str, dtype: torch.dtype, kind: str, *, four_bit: bool) -> PreTrainedModel:
    architecture = architecture_of(AutoConfig.from_pretrained(base, trust_remote_code=False))
    if not four_bit:
        # Load directly onto the GPU: via host memory, a 7B base would need 15 GB of it.
        place = {"device_map": {"": device}} if device.startswith("cuda") else {}
        model: PreTrainedModel = architecture.from_pretrained(
            base, dtype=dtype, attn_implementation=kind, trust_remote_code=False, **place
        )
        model.to(torch.device(device))  # pyright: ignore[reportArgumentType]  # a decorator hides the signature
        return model
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = architecture.from_pretrained(
        base,
        dtype=dtype,
        attn_implementation=kind,
        quantization_config=packed,
        device_map={"": device},
        trust_remote_code=False,
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # On a CPU bitsandbytes repacks a weight at its first use without gradients; backward is wrong afterwards.
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  # torch types attributes as tensors
    return model


def _check_four_bit(device: str, dtype: torch.dtype) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("load_in_4bit: bitsandbytes is not installed: pip install bitsandbytes, or leave it out")
    if device == "mps":
        raise _no_four_bit(device, "bitsandbytes does not serve it")
    if dtype == torch.float64:
        raise _no_four_bit(device, "bitsandbytes knows no float64")


def _no_four_bit(device: str, why: str) -> ConfigError:
    return ConfigError(f"load_in_4bit: this base cannot be held in 4 bits on device {device!r} ({why}): leave it out")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_OF_ADAPTER = {"base_layer", "lora_A", "lora_B"}


def adaptable_layers(base: PreTrainedModel) -> tuple[str, ...]:
    """The names of the base's linear layers, as `target_modules` matches them, with or without an adapter on them. In a
    mixture of experts, layers such as `gate_proj` are no part of it: PEFT takes these names for tensors of experts."""
    config = LoraConfig(target_modules=list(names := _linear_layers(base)))
    convert_peft_config_for_transformers(config, base, None)
    return tuple(name for name in names if name in (config.target_modules or ()))


def left_out(base: PreTrainedModel) -> tuple[str, ...]:
    """What all linear layers leave out of a mixture of experts, by its name in a layer: `mlp.experts`, `mlp.gate`. Experts
    and routers are tensors and no linear layers; `adaptable_layers` says what else. Empty for other bases."""
    others = [
        name
        for name, module in base.named_modules()
        if re.search(r"\blayers\.\d+\.", name)
        and not isinstance(module, nn.Linear | nn.Embedding | _ConvNd | LoraLayer)
        and not _OF_ADAPTER & {*name.split(".")}
        and any(value.ndim >= 2 for value in module.parameters(recurse=False))
    ]
    taken = set(_linear_layers(base)) - set(adaptable_layers(base))
    return tuple(sorted({re.split(r"\blayers\.\d+\.", name)[-1] for name in (*others, *taken)}))


def _linear_layers(base: PreTrainedModel) -> tuple[str, ...]:
    return tuple(
        name
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear | LoraLayer) and not _OF_ADAPTER & {*name.split(".")}
    )
