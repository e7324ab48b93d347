"""LoRA in the base's 16 bits: exact derivatives, near PEFT's float32, and off where the adapter is."""

from __future__ import annotations

from copy import deepcopy
from typing import cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from offbook.base.config import LoraOptions
from offbook.engine.learner.model.lora_linear import LoraLinear, compute_in_sixteen_bits
from offbook.engine.learner.model.policy import Policy
from offbook.tiny import path

R = 4


class Two(nn.Module):
    """Two layers of which both are adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(24, 16)
        self.up = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.tanh(self.down(x)))


def adapted(dtype: torch.dtype, dropout: float = 0.0, bias: bool = False) -> PeftModel:
    torch.manual_seed(0)
    options = LoraConfig(
        r=R, lora_alpha=8, target_modules=["down", "up"], lora_dropout=dropout, init_lora_weights=False, lora_bias=bias
    )
    return cast(PeftModel, get_peft_model(Two().to(dtype), options))  # pyright: ignore[reportArgumentType]


def gradients(model: PeftModel, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The output, the gradient of x, and those of the adapter."""
    x = x.clone().requires_grad_()
    out = model(x)
    out.float().square().sum().backward()
    assert x.grad is not None
    own = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return out.detach(), x.grad, own


@pytest.mark.parametrize("bias", [True, False])
def test_derivatives_are_those_of_finite_differences(bias: bool) -> None:
    torch.manual_seed(1)
    x, a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 6), (R, 6), (5, R)))
    weight = torch.randn(5, 6, dtype=torch.float64)
    added = torch.randn(5, dtype=torch.float64) if bias else None
    assert torch.autograd.gradcheck(
        lambda *values: LoraLinear.apply(values[0], weight, added, *values[1:], 0.7), (x, a, b)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_near_float32_and_the_adapter_stays_float32(dtype: torch.dtype) -> None:
    model = adapted(dtype)
    x = torch.randn(2, 7, 24).to(dtype)
    exact = gradients(deepcopy(model).float(), x.float())
    assert compute_in_sixteen_bits(model) == 2
    out, grad, own = gradients(model, x)
    assert out.dtype == grad.dtype == dtype
    assert {value.dtype for value in own.values()} == {torch.float32}
    assert own.keys() == exact[2].keys() and len(own) == 4
    bound = 8 * torch.finfo(dtype).eps
    for ours, true in ((out, exact[0]), (grad, exact[1]), *((own[name], exact[2][name]) for name in own)):
        assert (ours.float() - true).norm() <= bound * true.norm()


def test_without_the_adapter_it_is_the_base() -> None:
    model = adapted(torch.bfloat16)
    x = torch.randn(3, 24).bfloat16()
    with model.disable_adapter():
        expected = model(x)
        compute_in_sixteen_bits(model)
        assert torch.equal(model(x), expected)
    assert not torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("dtype", "dropout", "bias"),
    [(torch.float32, 0.0, False), (torch.bfloat16, 0.1, False), (torch.bfloat16, 0.0, True)],
)
def test_other_layers_are_left_to_peft(dtype: torch.dtype, dropout: float, bias: bool) -> None:
    assert compute_in_sixteen_bits(adapted(dtype, dropout, bias)) == 0


def test_a_sixteen_bit_policy_computes_so_also_after_a_reset() -> None:
    policy = Policy.load(path(), LoraOptions(r=2), threads=1, dtype=torch.bfloat16)
    for _ in range(2):
        layers = [m for m in policy.model.modules() if hasattr(m, "lora_A")]
        assert layers and all("forward" in vars(layer) for layer in layers)
        policy.reset_adapter(LoraOptions(r=2, seed=1))
