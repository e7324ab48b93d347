# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers and peft carry partial types.
"""Which layers of a base an adapter can have: linear ones that PEFT, vLLM and we call by the same names."""

from __future__ import annotations

import re

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]  # torch has no other name of the kind
from transformers import PreTrainedModel

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
