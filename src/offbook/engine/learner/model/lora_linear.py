# pyright: reportUnknownMemberType=false
# PEFT carries partial types.
"""Linear layers with LoRA, computed in the base's 16 bits.

PEFT converts a 16-bit layer's input to float32 for the adapter, and writes the scaled product and the sum separately; here
products are in the base's dtype with matrices of the adapter rounded to it, and the sums happen inside the products. The
adapter's weights stay float32. `benchmarks/layer_kernels.py` counts kernels and bytes."""

from __future__ import annotations

from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

ADAPTER_NAME = "default"
"""The name that PEFT gives the only adapter of a model."""


class LoraLinear(torch.autograd.Function):
    """y = x Wᵀ + bias + scale (x Aᵀ) Bᵀ, equation 3 of LoRA (arXiv 2106.09685) with scale = alpha / r.

    Shapes: x [..., in], weight W [out, in] (frozen), bias [out] or None (frozen), a [r, in], b [out, r]. Products are
    in x's dtype; gradients of a and b are returned in the dtype of a and b.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  # torch types it as *args
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        """y [..., out]. Keeps x, hidden = x Aᵀ [n, r], and the adapter's matrices in x's dtype."""
        rows = x.reshape(-1, x.shape[-1])
        down, up = a.to(x.dtype), (b * scale).to(x.dtype)
        hidden = rows @ down.T
        out = nn.functional.linear(rows, weight, bias).addmm_(hidden, up.T)
        ctx.save_for_backward(rows, weight, down, up, hidden)
        ctx.scale, ctx.dtypes = scale, (a.dtype, b.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        """Gradients of x, a and b from that of y [..., out]."""
        rows, weight, down, up, hidden = ctx.saved_tensors
        grad_rows = grad.reshape(-1, grad.shape[-1])
        grad_hidden = grad_rows @ up
        grad_a = (grad_hidden.T @ rows).to(ctx.dtypes[0])
        grad_b = (grad_rows.T @ hidden).to(ctx.dtypes[1]) * ctx.scale
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_rows @ weight).addmm_(grad_hidden, down).view(*grad.shape[:-1], -1)
        return grad_x, None, None, grad_a, grad_b, None


def compute_in_sixteen_bits(model: PeftModel) -> int:
    """Let the adapted layers of a 16-bit base compute as `LoraLinear`. Returns how many do.

    Left to PEFT: layers that are not plain `nn.Linear` (4-bit ones), and adapters with dropout or a bias."""
    layers = [module for module in model.modules() if isinstance(module, PeftLinear) and _plain(module)]
    for layer in layers:
        layer.forward = _Forward(layer)
    return len(layers)


class _Forward:
    """The forward of one adapted layer. Without the adapter it is the base's layer."""

    def __init__(self, layer: PeftLinear) -> None:
        self._layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        layer = self._layer
        base = cast(nn.Linear, layer.get_base_layer())
        if layer.disable_adapters or layer.merged:
            return base(x)
        a, b = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
        scale = cast(float, layer.scaling[ADAPTER_NAME])
        return cast(Tensor, LoraLinear.apply(x, base.weight, base.bias, a, b, scale))


def _plain(layer: PeftLinear) -> bool:
    base = layer.get_base_layer()
    return (
        type(base) is nn.Linear
        and base.weight.dtype in (torch.bfloat16, torch.float16)
        and not layer.lora_variant
        and not layer.lora_bias[ADAPTER_NAME]
        and isinstance(layer.lora_dropout[ADAPTER_NAME], nn.Identity)
    )
