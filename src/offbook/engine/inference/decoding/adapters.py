"""Loads LoRA adapters from PEFT folders, and applies one at a time to the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]  # safetensors is only partly typed
from torch import Tensor, nn

from offbook.base.config import describe
from offbook.base.errors import ConfigError

_PREFIX = "base_model.model."
_MAX_MERGED = 2  # adapters with merged weights in memory


class AdapterConfig(BaseModel):
    """The fields of `adapter_config.json` that affect the forward pass."""

    model_config = ConfigDict(extra="ignore")

    peft_type: str
    r: int = Field(ge=1)
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)

    def unsupported_setting(self) -> str | None:
        """The first setting that this engine does not support, as `field=value`; None if it supports all."""
        unsupported: dict[str, bool] = {
            f"peft_type={self.peft_type!r}": self.peft_type != "LORA",
            "use_dora=True": self.use_dora,
            f"bias={self.bias!r}": self.bias != "none",
            "fan_in_fan_out=True": self.fan_in_fan_out,
            f"modules_to_save={self.modules_to_save!r}": bool(self.modules_to_save),
            f"rank_pattern={self.rank_pattern!r}": bool(self.rank_pattern),
            f"alpha_pattern={self.alpha_pattern!r}": bool(self.alpha_pattern),
        }
        return next((name for name, is_set in unsupported.items() if is_set), None)


@dataclass(frozen=True)
class Delta:
    """The update of one layer: W + scale * b @ a (LoRA, 2106.09685, section 4.1). a float32 [r, in]; b float32 [out, r]."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter: its name in requests, its folder, and its deltas by module name."""

    name: str
    path: Path
    deltas: dict[str, Delta]


def load_adapter(name: str, path: Path, layers: dict[str, nn.Linear]) -> Adapter:
    """Load a PEFT folder with safetensors. Raises ConfigError, which names the invalid file and the reason.

    The scale is alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (2312.03732).
    """
    config_file, weights_file = path / "adapter_config.json", path / "adapter_model.safetensors"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise ConfigError(f"No adapter found for {path}: {file.name} is missing")
    try:
        config = AdapterConfig.model_validate_json(config_file.read_bytes())
    except ValidationError as error:
        raise ConfigError(describe(error, str(config_file))) from error
    if unsupported_setting := config.unsupported_setting():
        raise ConfigError(
            f"{config_file}: {unsupported_setting} is not supported by the embedded engine; train a plain LoRA"
        )
    try:
        tensors = load_file(weights_file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{weights_file} cannot be read as safetensors: {error}") from error
    scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    return Adapter(name, path, _deltas(tensors, layers, scale, weights_file))


def _deltas(tensors: dict[str, Tensor], layers: dict[str, nn.Linear], scale: float, file: Path) -> dict[str, Delta]:
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, _, rest = key.removeprefix(_PREFIX).rpartition(".lora_")
        if rest not in ("A.weight", "B.weight"):
            raise ConfigError(f"{file}: {key!r} is not a LoRA weight of a linear layer: train a plain LoRA")
        if module not in layers:
            raise ConfigError(
                f"{file}: {key!r} is not a linear layer of the base model: train the adapter on this base"
            )
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{file}: {key!r} has NaN or infinite values: use an earlier checkpoint")
        halves.setdefault(module, {})[rest[0]] = tensor
    if not halves:
        raise ConfigError(f"{file} has no weights: train the adapter again")
    deltas: dict[str, Delta] = {}
    for module, half in halves.items():
        if half.keys() != {"A", "B"}:
            raise ConfigError(f"{file}: {module!r} has only lora_{next(iter(half))}")
        layer = layers[module]
        shape = (half["B"].shape[0], half["A"].shape[-1])
        if shape != (layer.out_features, layer.in_features) or half["A"].shape[0] != half["B"].shape[-1]:
            raise ConfigError(
                f"{file}: {module!r} is {tuple(half['B'].shape)} x {tuple(half['A'].shape)}, "
                f"but the base's layer is {layer.out_features} x {layer.in_features}"
            )
        device = layer.weight.device
        deltas[module] = Delta(half["A"].to(device, torch.float32), half["B"].to(device, torch.float32), scale)
    return deltas


class Pack:
    """The weights of layers that read the same input, side by side: `base` [in, sum of out], `active` those with an adapter.

    Each layer's weight is a view of them. A layer of its own keeps its memory as it is, unless it is `laid_out`.
    """

    def __init__(self, names: Sequence[str], layers: dict[str, nn.Linear], *, laid_out: bool) -> None:
        self.names = names
        self._sizes = [layers[name].out_features for name in names]
        weights = [layers[name].weight.detach() for name in names]
        self.base = torch.cat(weights).t().contiguous() if laid_out else weights[0].t()
        self.active = self.base

    def views(self, packed: Tensor) -> dict[str, Tensor]:
        """The weight [out, in] of each layer in `packed` [in, sum of out]."""
        ends = list(accumulate(self._sizes))
        return {
            name: packed[:, end - size : end].t() for name, size, end in zip(self.names, self._sizes, ends, strict=True)
        }


_Merged = list[tuple[Pack, Tensor]]


class AdapterLayers:
    """The model's linear layers, to which one adapter at a time is applied. The base weights are never changed.

    In float32 an adapter is merged into copies of the weights. That is as fast as the base, and differs from the learner's
    forward pass only by rounding. In lower precision merging would round the update away, so it is added to the outputs.
    `packs`: names of layers whose weights are laid out side by side.
    """

    def __init__(self, layers: dict[str, nn.Linear], packs: Sequence[Sequence[str]] = ()) -> None:
        self._layers = layers
        self._packs: dict[str, Pack] = {}
        self._merging = all(layer.weight.dtype == torch.float32 for layer in layers.values())
        self._merged: OrderedDict[Adapter, _Merged] = OrderedDict()
        self._active: Adapter | None = None
        packed = {name for names in packs for name in names}
        for names in [*packs, *([name] for name in layers if name not in packed)]:
            pack = Pack(names, layers, laid_out=names[0] in packed)
            self._packs |= dict.fromkeys(names, pack)
            self._show(pack, pack.base)
        if not self._merging:
            for name, layer in layers.items():
                layer.register_forward_hook(self._adding(name))

    def pack(self, name: str) -> Pack:
        """The pack of a layer."""
        return self._packs[name]

    def activate(self, adapter: Adapter | None) -> None:
        """Apply `adapter` to the next forward passes; None for the base alone."""
        if adapter is self._active:
            return
        if self._merging:
            merged = dict(self._merge(adapter) if adapter else ())
            for pack in dict.fromkeys(self._packs.values()):
                self._show(pack, merged.get(pack, pack.base))
        self._active = adapter

    def forget(self, adapter: Adapter) -> None:
        """Free the merged weights of an adapter that is not used again."""
        if self._active is adapter:
            self.activate(None)
        self._merged.pop(adapter, None)

    def _show(self, pack: Pack, packed: Tensor) -> None:
        pack.active = packed
        for name, weight in pack.views(packed).items():
            self._layers[name]._parameters["weight"] = nn.Parameter(weight, False)  # pyright: ignore[reportPrivateUsage]  # no copy

    def _merge(self, adapter: Adapter) -> _Merged:
        merged = self._merged.get(adapter)
        if merged is None:
            merged = self._merged[adapter] = []
            for pack in dict.fromkeys(self._packs[name] for name in adapter.deltas):
                packed = pack.base.clone()
                for name, weight in pack.views(packed).items():
                    if delta := adapter.deltas.get(name):
                        weight.addmm_(delta.b, delta.a, alpha=delta.scale)
                merged.append((pack, packed))
            while len(self._merged) > _MAX_MERGED:
                self._merged.popitem(last=False)
        self._merged.move_to_end(adapter)
        return merged

    def _adding(self, name: str):  # torch defines the hook's type
        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            delta = self._active.deltas.get(name) if self._active else None
            if delta is None:
                return output
            low = nn.functional.linear(inputs[0].to(torch.float32), delta.a)
            return (output + nn.functional.linear(low, delta.b) * delta.scale).to(output.dtype)

        return add
