# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Liger has partial types and is not installed everywhere.
"""RMSNorm, RoPE and SwiGLU of the base as one kernel each, by Liger (github.com/linkedin/Liger-Kernel), where it is
installed. The plain layers run some six kernels for each, forward, and as many backward."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
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


def fuse(model: PreTrainedModel, *, sharded: bool = False) -> str:
    """Let the base's norms, rotations and MLPs run Liger's kernels; returns what runs, for the learner's facts.

    Hidden states and gradients of a short row are compared before and after. Where they differ by more than rounding, or a
    kernel fails, everything is undone, and the log says why. With a `sharded` model what a kernel raises is raised."""
    kind = str(model.config.get_text_config().model_type)
    if kind not in FUSED or model.dtype not in TOLERANCE:
        return "torch"
    expected = _probe(model)
    kernels = _Kernels(model)
    try:
        kernels.install()
        errors = [_relative_error(*pair) for pair in zip(_probe(model), expected, strict=True)]
    except Exception as error:  # whatever a kernel raises on this device: the plain layers ran
        if sharded:
            raise  # FSDP is in no state for another pass
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
    """Hidden states of a short random row, and the gradient of its embeddings."""
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


def _relative_error(computed: Tensor, expected: Tensor) -> float:
    return float((computed - expected).norm() / expected.norm())
