"""A base with LoRA on torch's meta device, and the bytes that its passes keep alive there: no memory is taken."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offbook.engine.learner.model.lora_linear import compute_in_sixteen_bits

ATTENTION = "memory_plan_attention"


class _Kernel(torch.autograd.Function):
    """A flash kernel's memory: it keeps queries, keys, values, its output and a float per query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, **_: object
) -> tuple[Tensor, None]:
    return _Kernel.apply(query, key, value).transpose(1, 2).contiguous(), None  # pyright: ignore[reportOptionalMemberAccess]


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make: `live` now, `peak` at most. Those of `known` are not counted."""

    def __init__(self, known: Mapping[int, int] | None = None) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes = dict(known or {})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = storage.nbytes()
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._gone, storage._cdata)
        return result

    def _gone(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


@dataclass(frozen=True)
class Pass:
    """Bytes of one row: what its backward pass needs (`saved`), and the peak of everything."""

    saved: int
    peak: int


class MetaBase:
    """A base of `config`, in bfloat16, with LoRA on all linear layers; `sixteen_bits=False`: the LoRA in fp32, as with a base in 4 bits."""

    def __init__(
        self, config: Mapping[str, Any], rank: int, layers: int | None = None, *, sixteen_bits: bool = True
    ) -> None:
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
        numbers = {**config, **({} if layers is None else {"num_hidden_layers": layers})}
        with torch.device("meta"):
            self.base = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**numbers), dtype=torch.bfloat16, attn_implementation=ATTENTION
            )
            self.base_bytes = sum(value.nbytes for value in self.base.parameters())
            lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model: PeftModel = get_peft_model(self.base, lora)
            if sixteen_bits:
                compute_in_sixteen_bits(self.model)

    @property
    def adapter(self) -> list[Tensor]:
        """The LoRA's weights."""
        return [value for value in self.model.parameters() if value.requires_grad]

    def run(self, tokens: int, *, recompute: bool, trains: bool = True, backward: bool | None = None) -> Pass:
        """Forward of the body, and backward (by default with recomputation only), on one row of so many tokens. What
        autograd saves is only counted without a backward pass."""
        backward = recompute if backward is None else backward
        if recompute:
            self.base.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train(recompute)
        known = {value.untyped_storage()._cdata: 0 for value in (*self.model.parameters(), *self.model.buffers())}
        saved: dict[int, int] = {}
        held: list[Tensor] = []  # alive until the end, so that no storage takes the place of another

        def pack(tensor: Tensor) -> Tensor:
            key = tensor.untyped_storage()._cdata
            if key not in known:
                saved[key] = tensor.untyped_storage().nbytes()
                held.append(tensor)
            return tensor

        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        positions = torch.arange(tokens, device="meta")[None]
        watched = nullcontext() if backward else torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with LiveBytes(known) as live, torch.set_grad_enabled(trains), watched:
            hidden = self.base.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            if backward:
                hidden.sum().backward()
        return Pass(sum(saved.values()), live.peak)
