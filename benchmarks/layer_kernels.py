"""Kernels and bytes of one decoder layer, forward and backward: python benchmarks/layer_kernels.py. Counted, not timed.

The layer lies on torch's meta device, where operations have shapes but no numbers, so neither a GPU nor the weights are
needed. Each operation of ATen that is not a view counts as one kernel. Its bytes are those of the tensors that it reads and
writes, base weights left out: their traffic is shared by all tokens of a row. Attention counts as one kernel forward and one
backward. The figures are those of eager torch; nothing here was measured on a GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offbook.base.config import LoraOptions
from offbook.engine.learner.model.lora_linear import compute_in_sixteen_bits
from offbook.memory_plan.parts import published

BASE = "Qwen/Qwen2.5-7B-Instruct"
TOKENS = 4096
OUT = Path(__file__).parent / "results" / "layer_kernels.md"
VARIANTS = {
    "no adapter": "none",
    "PEFT: the adapter in float32 (before)": "peft",
    "`LoraLinear`: the adapter in 16 bits (now)": "sixteen",
}


@dataclass
class Count:
    """Kernels and bytes, without base weights."""

    kernels: int = 0
    bytes: int = 0


class _Counter(TorchDispatchMode):
    """Counts the operations that run inside it."""

    def __init__(self, frozen: set[int]) -> None:
        super().__init__()
        self.count = Count()
        self._frozen = frozen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        view = bool(returned) and all(each.alias_info and not each.alias_info.is_write for each in returned)
        if not view and "empty" not in func._schema.name:
            self.count.kernels += 1
            read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            written = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
            self.count.bytes += sum(self._size(value) for value in read + written)
        return result

    def _size(self, value: Tensor) -> int:
        storage = value.untyped_storage()
        if storage._cdata in self._frozen:
            return 0
        return min(value.numel() * value.element_size(), storage.nbytes())


@torch.library.custom_op("offbook_benchmark::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One kernel: [1, heads, tokens, channels] to the same."""
    raise NotImplementedError("counted on the meta device only")


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("offbook_benchmark::attention_backward", mutates_args=())
def attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> list[Tensor]:
    """One kernel: the gradients of query, key and value."""
    raise NotImplementedError("counted on the meta device only")


@attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> list[Tensor]:
    return [torch.empty_like(each) for each in (query, key, value)]


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


attention.register_autograd(lambda ctx, grad: tuple(attention_backward(grad, *ctx.saved_tensors)), setup_context=_keep)


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """The attention of the layers, under transformers' interface."""
    return attention(query, key, value).transpose(1, 2), None


def layers(number: int, adapter: str, *, recompute: bool, tokens: int) -> Count:
    """Count a forward and a backward pass of a base with so many layers, without its head."""
    config = AutoConfig.for_model(**next(base.config for base in published() if base.name == BASE))
    config.num_hidden_layers = number
    config._attn_implementation = "counted"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.requires_grad_(False)
        frozen = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
        if adapter != "none":
            options = LoraOptions()
            chosen = options.target_modules
            wanted = chosen if isinstance(chosen, str) else list(chosen)
            wrapped = get_peft_model(model, LoraConfig(r=options.r, lora_alpha=16, target_modules=wanted))
            if adapter == "sixteen":
                compute_in_sixteen_bits(wrapped)
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        hidden = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        places = torch.arange(tokens)[None]
        with _Counter(frozen) as counter:
            body = model.model
            output = body(inputs_embeds=hidden, position_ids=places, use_cache=False).last_hidden_state
            output.backward(torch.empty_like(output))
    return counter.count


def one_layer(adapter: str, *, recompute: bool, tokens: int = TOKENS) -> Count:
    """What one more layer adds: kernels, and bytes of `tokens` tokens."""
    one, two = (layers(number, adapter, recompute=recompute, tokens=tokens) for number in (1, 2))
    return Count(two.kernels - one.kernels, two.bytes - one.bytes)


def page() -> str:
    """The table."""
    options = LoraOptions()
    lines = [
        "# Kernels and bytes of one layer",
        "",
        f"Written by `python benchmarks/layer_kernels.py`: one layer of {BASE} in bfloat16 with a LoRA of rank {options.r}, a row of {TOKENS:,} tokens, forward and",
        "backward, on torch's meta device. Counted, not measured on a GPU. Bytes are per token and leave base weights out.",
        "",
        "| adapter | layers recomputed in the backward pass | kernels | MB per token |",
        "|---|---|---|---|",
    ]
    for title, adapter in VARIANTS.items():
        for recompute in (False, True):
            count = one_layer(adapter, recompute=recompute)
            answer = "yes" if recompute else "no"
            lines.append(f"| {title} | {answer} | {count.kernels} | {count.bytes / TOKENS / 1e6:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUT)
    text = page()
    parser.parse_args().output.write_text(text, encoding="utf-8")
    print(text, end="")


ALL_ATTENTION_FUNCTIONS.register("counted", attend)

if __name__ == "__main__":
    main()
