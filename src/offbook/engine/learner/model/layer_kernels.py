# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Liger has partial types and is not installed everywhere.
"""Kernels in place of a base's plain layers: RMSNorm, RoPE and SwiGLU as one kernel each, by Liger (github.com/linkedin/Liger-Kernel),
where it is installed, and linear layers with LoRA computed in the base's 16 bits.

The plain layers run some six kernels for each of the first three, forward, and as many backward. PEFT converts a 16-bit layer's
input to float32 for the adapter, and writes the scaled product and the sum separately; here products are in the base's dtype with
matrices of the adapter rounded to it, and the sums happen inside the products. The adapter's weights stay float32.
`benchmarks/layer_kernels.py` counts kernels and bytes."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FUSED = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Architectures whose layers compute what the kernels do."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest relative error of hidden states and gradients, in the 2-norm, that rounding explains."""
ROPE = "apply_rotary_pos_emb"
PROBE_TOKENS = 16


def installed() -> bool:
    """Whether Liger can be imported."""
    return importlib.util.find_spec("liger_kernel") is not None


def fuse(model: PreTrainedModel) -> str:
    """Let the base's norms, rotations and MLPs run Liger's kernels; returns what runs, for the learner's facts.

    Hidden states and gradients of a short row are compared before and after. Where they differ by more than rounding, or a
    kernel fails, everything is undone, and the log says why."""
    kind = str(model.config.get_text_config().model_type)
    if kind not in FUSED or model.dtype not in TOLERANCE:
        return "torch"
    expected = _probe(model)
    kernels = _Kernels(model)
    try:
        kernels.install()
        errors = [float((new - old).norm() / old.norm()) for new, old in zip(_probe(model), expected, strict=True)]
    except Exception as error:  # noqa: BLE001  # whatever a kernel raises on this device: the plain layers ran
        reason = f"{type(error).__name__}: {str(error).strip()[:300]}"
    else:
        allowed = TOLERANCE[model.dtype]
        if all(error <= allowed for error in errors):  # not `max`, which may pass over NaN
            return f"liger {importlib.metadata.version('liger-kernel')}"
        reason = "hidden states differ by {:.2g} and gradients by {:.2g} of their norm".format(*errors)
        reason += f" (allowed {allowed:g})"
    kernels.remove()
    logger.warning("Liger's kernels are not used for this base, its plain layers are: %s", reason)
    return "torch"


class _Kernels:
    """The parts of one model that kernels replace. RoPE is a function of the model's module, so all models of that
    architecture in this process get it."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = list(model.modules())
        self._norms = [module for module in modules if type(module).__name__.endswith("RMSNorm")]
        self._mlps = [module for module in modules if type(module).__name__.endswith("MLP") and _is_swiglu(module)]
        self._source = sys.modules[type(model).__module__]
        self._rope: Callable[..., object] = getattr(self._source, ROPE)

    def install(self) -> None:
        """Replace them. Raises ImportError."""
        ops = importlib.import_module("liger_kernel.ops")
        rope = importlib.import_module("liger_kernel.transformers.rope")
        for norm in self._norms:
            norm.forward = _Norm(norm, ops.LigerRMSNormFunction.apply)
        for mlp in self._mlps:
            mlp.forward = _Swiglu(mlp, ops.LigerSiLUMulFunction.apply)
        setattr(self._source, ROPE, rope.liger_rotary_pos_emb)

    def remove(self) -> None:
        """Undo `install`."""
        for module in (*self._norms, *self._mlps):
            vars(module).pop("forward", None)
        setattr(self._source, ROPE, self._rope)


class _Norm:
    """The forward of an RMSNorm: normalised in float32, scaled in the input's precision."""

    def __init__(self, norm: nn.Module, kernel: Callable[..., Tensor]) -> None:
        self._norm = cast(Any, norm)
        self._kernel = kernel

    def __call__(self, hidden_states: Tensor) -> Tensor:
        epsilon = float(self._norm.variance_epsilon)
        return self._kernel(hidden_states, self._norm.weight, epsilon, 0.0, "llama", False)  # False: not in place


class _Swiglu:
    """The forward of an MLP: silu of the gate times the other projection. The projections stay, with their LoRA."""

    def __init__(self, mlp: nn.Module, kernel: Callable[..., Tensor]) -> None:
        self._mlp = cast(Any, mlp)
        self._kernel = kernel

    def __call__(self, x: Tensor) -> Tensor:
        return self._mlp.down_proj(self._kernel(self._mlp.gate_proj(x), self._mlp.up_proj(x)))


def _is_swiglu(mlp: nn.Module) -> bool:
    return (
        isinstance(getattr(mlp, "act_fn", None), nn.SiLU)
        or "silu" in type(getattr(mlp, "act_fn", None)).__name__.lower()
    )


def _probe(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    table = cast(nn.Embedding, model.get_input_embeddings()).weight
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(table.shape[0], (1, PROBE_TOKENS), generator=draw).to(table.device)
    embedded = table.detach()[ids].clone().requires_grad_()
    body = getattr(model, model.base_model_prefix)
    with torch.enable_grad():
        hidden = cast(Tensor, body(inputs_embeds=embedded, use_cache=False).last_hidden_state)
        weights = torch.randn(hidden.shape, generator=draw).to(hidden)
        [gradient] = torch.autograd.grad((hidden * weights).sum(), [embedded])
    return hidden.detach().float(), gradient.float()


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
