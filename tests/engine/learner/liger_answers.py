"""Liger's kernels in Triton's interpreter, on a CPU: `python -m tests.engine.learner.liger_answers OUT.json`.

Of four random bases: how many modules run a kernel, and the largest relative error of the logprobs and of the LoRA's
gradients against the plain layers. Then what becomes of a kernel that is wrong, and of one that fails."""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportMissingTypeStubs=false

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM
from triton.runtime import interpreter

from offbook.base.config import LoraOptions
from offbook.engine.learner.model import layer_kernels
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.rows.layouts import plan
from tests.engine.learner.jobs import random_groups
from tests.engine.learner.test_invariance import VOCABULARY, batch_of
from tests.engine.learner.tiny_models import SHAPE, warm, write_base

_CONVERT = interpreter._implicit_cvt


@triton.jit
def rsqrt(x):  # pyright: ignore[reportMissingParameterType]
    return 1.0 / tl.sqrt(x)


def teach_the_interpreter() -> None:
    """Two things that compiled kernels can do and Triton 3.9's interpreter cannot: methods of a float argument, and CUDA's
    reciprocal square root."""
    import liger_kernel.ops.rms_norm as rms_norm

    def converted(value: object) -> object:
        if type(value) is float:
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return _CONVERT(value)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = rsqrt


def base(family: str, folder: Path) -> Path:
    if family in ("llama", "qwen2"):
        return write_base(folder, family)
    config, kind = {"mistral": (MistralConfig, MistralForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[family]
    torch.manual_seed(1)
    kind(config(**{**SHAPE, "head_dim": 8, "tie_word_embeddings": False})).save_pretrained(folder)  # pyright: ignore
    return folder


def answers(policy: Policy) -> tuple[Tensor, Tensor]:
    """The logprobs of a tree of calls, and the LoRA's gradient of their sum, in one vector."""
    batch = batch_of(random_groups(3, groups=1, rollouts=2, turns=2, vocabulary=VOCABULARY))
    [row] = plan(batch.samples, "tree", 16_384, policy.shape).rows
    logprobs, _, _ = policy.row_logprobs(row, batch.settings)
    gradients = torch.autograd.grad(logprobs.sum(), list(policy.trainable_parameters().values()))
    return logprobs.detach(), torch.cat([value.flatten() for value in gradients])


def compared(family: str, folder: Path) -> dict[str, Any]:
    lora = LoraOptions(r=2, alpha=4)
    policy = warm(Policy.load(base(family, folder), lora))
    plain = answers(policy)
    model = policy.model.get_base_model()
    ran = layer_kernels.fuse(model)  # pyright: ignore[reportArgumentType]
    fused = answers(policy)
    replaced = sum("forward" in vars(module) for module in model.modules() if "LoraLayer" not in str(type(module)))
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(fused, plain, strict=True)]
    return {"ran": ran, "replaced": replaced, "logprobs": errors[0], "gradients": errors[1]}


def refused(folder: Path, apply: Any) -> dict[str, Any]:
    """What `fuse` answers when the kernel of SwiGLU is another function, and whether the plain layers are back."""
    import liger_kernel.ops as ops

    policy = warm(Policy.load(base("llama", folder), LoraOptions(r=2, alpha=4)))
    plain = answers(policy)
    kept, ops.LigerSiLUMulFunction = ops.LigerSiLUMulFunction, type("Other", (), {"apply": staticmethod(apply)})
    try:
        ran = layer_kernels.fuse(policy.model.get_base_model())  # pyright: ignore[reportArgumentType]
    finally:
        ops.LigerSiLUMulFunction = kept
    same = all(torch.equal(one, other) for one, other in zip(answers(policy), plain, strict=True))
    return {"ran": ran, "same": same}


class NoGradient(torch.autograd.Function):
    """SwiGLU with the right values and gradients of NaN."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return gradient * torch.nan, gradient * torch.nan


def fail(*_: Tensor) -> Tensor:
    raise RuntimeError("no such device")


def main() -> None:
    teach_the_interpreter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found: dict[str, Any] = {
            family: compared(family, folder / family) for family in ("llama", "mistral", "qwen2", "qwen3")
        }
        found["wrong"] = refused(folder / "wrong", lambda a, b: a * b)
        found["nan"] = refused(folder / "nan", NoGradient.apply)
        found["failing"] = refused(folder / "failing", fail)
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
