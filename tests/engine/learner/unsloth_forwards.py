"""Unsloth's own forward passes, layers and recomputation on a CPU, in a process of its own: measures trees against rows.

    python -m tests.engine.learner.unsloth_forwards OUTPUT.json [FOLDER]

FOLDER: an unpacked wheel of another version of Unsloth, whose modules replace the installed ones. Plain torch stands in
for four Triton kernels: RMS norm, RoPE, the fused norm of queries and keys (switched off), and the tables of positions.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from offbook.engine.learner.model import unsloth_loader

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
WINDOWED = "mistral, window 16"
WINDOW = 16
LAYERS = 3
CONTEXT = 512
VOCABULARY = 97
Measured = tuple[Tensor, dict[str, Tensor]]


def import_unsloth(folder: str | None) -> None:
    unsloth_loader.import_first()
    if folder is None:
        return
    device = importlib.import_module("unsloth.device_type")
    for name in [name for name in sys.modules if name.split(".")[0] == "unsloth"]:
        del sys.modules[name]
    package = types.ModuleType("unsloth")  # without its start-up, which needs a GPU
    package.__path__, package.__spec__ = [f"{folder}/unsloth"], ModuleSpec("unsloth", None, is_package=True)
    sys.modules |= {"unsloth": package, "unsloth.device_type": device}


def rms_norm(norm: Any, states: Tensor, gemma: bool = False, **_: Any) -> Tensor:
    return torch.nn.functional.rms_norm(states, states.shape[-1:], norm.weight + int(gemma), norm.variance_epsilon)


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> tuple[Tensor, ...]:
    picked = torch.arange(query.shape[2])[None] if positions is None else positions.long().view(query.shape[0], -1)

    def turn(states: Tensor) -> Tensor:
        first, second = states.chunk(2, -1)
        return states * cos[picked][:, None] + torch.cat([-second, first], -1) * sin[picked][:, None]

    return turn(query), turn(key)


class Rotary(torch.nn.Module):
    """Unsloth's tables hold a tensor per CUDA device. These have the same methods, and only the rows asked for."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.inverse = config.rope_parameters["rope_theta"] ** -(torch.arange(0, 1, 2 / config.head_dim))

    def extend_rope_embedding(self, *_: Any, **__: Any) -> None: ...

    def get_cached(self, length: int, _: Any = None) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(length).float(), self.inverse).repeat(1, 2)
        return angles.cos(), angles.sin()


def patch(family: str) -> None:
    """Unsloth's own patch of one architecture, then the stand-ins."""
    module = importlib.import_module(f"unsloth.models.{family}")
    getattr(module, f"Fast{FAMILIES[family]}Model").pre_patch()
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    setattr(modeling, f"{FAMILIES[family]}RotaryEmbedding", Rotary)
    importlib.import_module("unsloth.models.qwen3")._qk_norm_rope.QK_NORM_ROPE_ENABLED = False
    for name in [name for name in sys.modules if name.startswith("unsloth.models.")]:
        vars(sys.modules[name]).update(fast_rms_layernorm=rms_norm, fast_rope_embedding=rope)


def make(family: str, *, patched: bool, window: int | None = None) -> Any:
    """A tiny random policy whose adapter is not zero."""
    from peft import LoraConfig, get_peft_model

    from offbook.base.config import LoraOptions
    from offbook.engine.learner.model import attention
    from offbook.engine.learner.model.policy import Policy

    attention.register()
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(modeling, f"{FAMILIES[family]}Config")(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        sliding_window=window,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    base = getattr(modeling, f"{FAMILIES[family]}ForCausalLM")(config)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, value in model.named_parameters():
        if value.ndim > 1:
            torch.nn.init.normal_(value, std=0.1 if "lora_" in name else 0.2)
    if patched and family == "mistral":
        for layer in base.model.layers:  # this family's attention reads tables of its own
            layer.self_attn.rotary_emb = Rotary(config)
    return Policy(model.eval(), lambda: None, None, LoraOptions(), "unsloth" if patched else "peft")  # type: ignore[arg-type, return-value]


def measure(policy: Any, layout: str, recompute: Callable[..., Any] | None = None, shape: Any = None) -> Measured:
    """Logprobs and adapter gradients of the mask probe's calls. `recompute`: the layers' checkpointing function."""
    from offbook.engine.learner.model import probes
    from offbook.engine.learner.rows import layouts

    base = policy.model.get_base_model()
    if recompute is not None:
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable({"use_reentrant": True})
        for layer in base.model.layers:
            layer._gradient_checkpointing_func = recompute
    policy._read_model()
    calls = probes._samples(VOCABULARY, WINDOW * 2)
    targets = probes._plain_settings(calls)
    result = torch.zeros(len(targets.token_ids), dtype=torch.float64)
    policy.model.zero_grad()
    for row in layouts.plan(calls, layout, 4096, shape or policy.shape).rows:  # type: ignore[arg-type]
        assert shape is None or (row.forest is not None and (row.forest.segments.parent < 0).all()), "not packed"
        values, _, _ = policy.row_logprobs(row, targets)
        at = torch.from_numpy(row.target_numbers)
        result[at] = values.detach().double()
        (values.double() * torch.linspace(-1, 1, len(result))[at]).sum().backward()
    if recompute is not None:
        base.gradient_checkpointing_disable()
        base.disable_input_require_grads()
        policy._read_model()
    return result, {name: value.grad.clone() for name, value in policy.trainable_parameters().items()}


def apart(one: Measured, other: Measured) -> dict[str, float]:
    """Largest differences: of a logprob in nats, and of a gradient relative to its tensor's largest."""
    gradients = max(float((one[1][n] - other[1][n]).abs().max() / one[1][n].abs().max()) for n in one[1])
    return {"logprobs": float((one[0] - other[0]).abs().max()), "gradients": gradients}


def recomputations() -> dict[str, Callable[..., Any]]:
    zoo = importlib.import_module("unsloth_zoo.gradient_checkpointing")
    # What Unsloth's start-up sets; its offload begins at 2 MiB a layer and needs CUDA streams.
    vars(zoo).update(FIRST_PASS=True, LAST_GC_INDEX=0, CURRENT_GC_INDEX=0, MINIMUM_SIZE=2**21, FP32_OFFLOAD_EXACT=False)
    return {
        "torch": lambda f, *a: CheckpointFunction.apply(f, False, *a),
        "unsloth": zoo.Unsloth_Gradient_Checkpointer.apply,
        "unsloth offloaded": zoo.Unsloth_Offloaded_Gradient_Checkpointer.apply,
        "unsloth smart": lambda f, *a: zoo.UnslothCheckpointFunction.apply(f, False, *a),
    }


def auto(policy: Any) -> str:
    """The layout that `auto` takes for the mask probe's calls."""
    from offbook.engine.learner.model import probes
    from offbook.engine.learner.rows import layouts

    calls = probes._samples(VOCABULARY, WINDOW * 2)
    return layouts.plan(calls, "auto", 4096, policy.shape, tree_refused=policy.tree_refused).layout


def moved_slot(family: str) -> tuple[str | None, str]:
    """Why the tree is refused where Unsloth's context has no longer a field that the tree needs, and what is trained."""
    from offbook.engine.learner.model import unsloth_attention

    needed = unsloth_attention.CONTEXT_FIELDS
    unsloth_attention.CONTEXT_FIELDS = needed | {"moved_field"}  # type: ignore[misc]
    try:
        policy = make(family, patched=True)
        return policy.tree_refused, auto(policy)
    finally:
        unsloth_attention.CONTEXT_FIELDS = needed  # type: ignore[misc]


def unhooked(policy: Any) -> str:
    """What Unsloth says of a tree without the wrapper."""
    from offbook.engine.learner.model import unsloth_attention

    wrapped = {
        name: vars(module)["run_attention"]
        for name, module in sys.modules.items()
        if hasattr(vars(module).get("run_attention"), unsloth_attention._WRAPPED)
    }
    for name, wrapper in wrapped.items():
        vars(sys.modules[name])["run_attention"] = getattr(wrapper, unsloth_attention._WRAPPED)
    policy._read_model = lambda: None
    try:
        measure(policy, "tree")
        return "nothing"
    except Exception as error:  # noqa: BLE001  # whatever it is, the test reads it
        return f"{type(error).__name__}: {error}"
    finally:
        del policy._read_model
        for name, wrapper in wrapped.items():
            vars(sys.modules[name])["run_attention"] = wrapper


def answers(stock: dict[str, Measured], family: str, window: int | None) -> dict[str, Any]:
    from offbook.engine.learner.model.probes import mask_probe

    label = family if window is None else WINDOWED
    policy = make(family, patched=True, window=window)
    rows = measure(policy, "call_rows")
    refused = mask_probe(policy)
    cheap_attention = replace(policy.shape, heads=1, head_dim=1, layers=1, call_flops=1.0)
    found: dict[str, Any] = {
        "forward": type(policy.model.get_base_model().model.layers[0].self_attn).forward.__module__,
        "probe": [refused is None, policy.tree_difference, refused],
        "transformers": apart(stock[label], rows),
        "tree": apart(rows, measure(policy, "tree")),
        "packed leaf rows": apart(rows, measure(policy, "leaf_rows", shape=cheap_attention)),
        "attention": policy.attention,
        "auto": auto(policy),
        "longest_row": policy.shape.longest_row,
        "unhooked": unhooked(policy),
    }
    for name, function in recomputations().items() if window is None else ():
        with counted() as calls:
            found[f"tree, recomputed by {name}"] = apart(rows, measure(policy, "tree", function))
        found[f"layers, recomputed by {name}"] = [calls.count(False), calls.count(True)]
    return found


@contextmanager
def counted() -> Iterator[list[bool]]:
    """One entry per call of attention on a tree: whether gradients were on."""
    from offbook.engine.learner.model import unsloth_attention

    calls: list[bool] = []
    attend = unsloth_attention.tree_attention

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        return attend(*arguments, **options)

    unsloth_attention.tree_attention = counting
    try:
        yield calls
    finally:
        unsloth_attention.tree_attention = attend


def main(output: Path, folder: str | None) -> None:
    import_unsloth(folder)
    torch.set_num_threads(1)
    stock = {family: measure(make(family, patched=False), "call_rows") for family in FAMILIES}
    stock[WINDOWED] = measure(make("mistral", patched=False, window=WINDOW), "call_rows")
    for family in FAMILIES:
        patch(family)
    found = {"moved": moved_slot("llama")}
    found |= {family: answers(stock, family, None) for family in FAMILIES}
    found[WINDOWED] = answers(stock, "mistral", WINDOW)
    output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
