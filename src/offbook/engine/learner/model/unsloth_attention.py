"""Attention on a token tree inside Unsloth's own layers.

On a GPU Unsloth replaces the forward passes of Llama, Mistral, Qwen2, Qwen3 and others. Their attention calls one
function, `run_attention`, instead of transformers' attention function, so `attention.tree_attention` is never called.
`install` wraps that function. The tree travels under `SLOT`, Unsloth's own keyword for attention that is not plainly
causal. Without the wrapper Unsloth raises an error on a tree there; it cannot train on one as on a plain row.

Read in Unsloth 2026.10.7 and 2026.10.9. `install` compares the loaded version with what was read there and refuses the
tree where they differ.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from .attention import TreeContext, tree_attention

SLOT = "prefix_seg_info"
"""The argument of Unsloth's forward passes that carries the tree."""
DISPATCH = "unsloth.utils.attention_dispatch"
PARAMETERS = frozenset({"config", "context", "Q", "K", "V"})
CONFIG_FIELDS = frozenset({"flash_dense_kwargs", "flash_varlen_kwargs", "sdpa_kwargs", "xformers_kwargs"})
CONTEXT_FIELDS = frozenset({"seq_info", "attention_mask", "sliding_window", "is_causal", SLOT})
BY_LENGTH = ("longrope", "dynamic")
"""Types of RoPE whose frequencies depend on a row's length."""
_WRAPPED = "offbook_wrapped"  # attribute of the wrapper: Unsloth's own function
_FULL = (-1, -1)  # flash attention's name for no window
_SCALES = ("softmax_scale", "scale")


@dataclass(frozen=True)
class Signatures:
    """Names in Unsloth's attention module: parameters of `run_attention`, fields of AttentionConfig and
    AttentionContext."""

    parameters: frozenset[str]
    config: frozenset[str]
    context: frozenset[str]

    @classmethod
    def of(cls, dispatch: ModuleType) -> Signatures:
        """Read the names of the loaded module. Raises AttributeError or TypeError if one of the three is gone."""
        run = getattr(dispatch.run_attention, _WRAPPED, dispatch.run_attention)
        config, context = (
            frozenset(field.name for field in dataclasses.fields(kind))
            for kind in (dispatch.AttentionConfig, dispatch.AttentionContext)
        )
        return cls(frozenset(inspect.signature(run).parameters), config, context)

    def mismatch(self) -> str | None:
        """How the names differ from what the wrapper needs; None: they fit. More fields than needed fit, other
        parameters do not."""
        if self.parameters != PARAMETERS:
            return f"run_attention takes {sorted(self.parameters)}, not {sorted(PARAMETERS)}"
        for name, fields, needed in (
            ("AttentionConfig", self.config, CONFIG_FIELDS),
            ("AttentionContext", self.context, CONTEXT_FIELDS),
        ):
            if missing := needed - fields:
                return f"{name} has no field {', '.join(sorted(missing))}"
        return None


def patched(model: nn.Module) -> bool:
    """Whether the attention layers run a forward pass of Unsloth's."""
    return any(forward.__module__.startswith("unsloth.") for forward in _forwards(model))


def install(model: nn.Module) -> str | None:
    """Wrap `run_attention` in all loaded modules of Unsloth. Returns None, or why the tree must not be used: then
    nothing was changed. May be called repeatedly. The wrapper passes on every call without a tree of ours."""
    try:
        dispatch = importlib.import_module(DISPATCH)
        mismatch = Signatures.of(dispatch).mismatch()
    except (ImportError, AttributeError, TypeError) as error:
        return _refusal(f"{DISPATCH}: {type(error).__name__}: {error}")
    if mismatch is not None:
        return _refusal(mismatch)
    if (rope := _rope(model)) in BY_LENGTH:
        return f"Unsloth picks the factors of {rope!r} positions by the row's length, and a tree row has many lengths"
    original = getattr(dispatch.run_attention, _WRAPPED, dispatch.run_attention)
    for forward in _forwards(model):
        used = forward.__globals__.get("run_attention")
        if getattr(used, _WRAPPED, used) is not original:
            return _refusal(f"{forward.__module__}.{forward.__qualname__} does not call run_attention")
    wrapper = dispatch.run_attention if hasattr(dispatch.run_attention, _WRAPPED) else _wrap(original)
    for name, module in list(sys.modules.items()):
        if name.startswith("unsloth.") and vars(module).get("run_attention") is original:
            vars(module)["run_attention"] = wrapper
    for forward in _forwards(model):
        if forward.__globals__["run_attention"] is not wrapper:
            return _refusal(f"{forward.__module__} keeps a run_attention of its own")
    return None


def _rope(model: nn.Module) -> str | None:
    config: Any = getattr(model, "config", None)
    options: Any = getattr(config.get_text_config(), "rope_parameters", None) if config is not None else None
    return cast("dict[str, Any]", options or {}).get("rope_type")


def _refusal(difference: str) -> str:
    version = getattr(sys.modules.get("unsloth"), "__version__", "of unknown version")
    return f"Unsloth {version} has another attention than the tree was written for ({difference})"


def _forwards(model: nn.Module) -> list[Any]:
    own = {type(module).forward for module in model.modules() if type(module).__name__.endswith("Attention")}
    return [inspect.unwrap(forward) for forward in own]


def _wrap(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run_attention(*, config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        tree = getattr(context, SLOT)
        if not isinstance(tree, TreeContext):
            return original(config=config, context=context, Q=Q, K=K, V=V)
        scale = _checked_scale(config, context, tree)
        if Q.shape[0] != 1 or Q.shape[2] != K.shape[2]:
            raise ValueError(f"attention on a tree: queries {tuple(Q.shape)} and keys {tuple(K.shape)} are not one row")
        query, key, value = _one_dtype(Q, K, V)
        layer = nn.Identity()  # tree attention reads nothing of the module
        window = cast("int | None", context.sliding_window)
        out, _ = tree_attention(layer, query, key, value, None, scale, sliding_window=window, offbook_tree=tree)
        return out

    setattr(run_attention, _WRAPPED, original)
    return run_attention


def _checked_scale(config: Any, context: Any, tree: TreeContext) -> float | None:
    """The factor of the scores, None: 1 / sqrt(channels). Raises ValueError for anything else that changes attention
    and that a tree does not compute."""
    changed = [] if context.attention_mask is None else ["attention_mask"]
    changed += [] if _same_trees(context.seq_info, tree) else ["seq_info"]
    changed += [] if context.is_causal else ["is_causal=False"]
    scales: set[float] = set()
    for field in sorted(CONFIG_FIELDS):
        options: Mapping[str, Any] = getattr(config, field) or {}
        for name, option in options.items():
            if name in _SCALES:
                scales |= {option} if option is not None else set()
            elif not _harmless(name, option, context.sliding_window):
                changed.append(f"{field}[{name!r}]={option!r}")
    if changed or len(scales) > 1:
        raise ValueError(f"attention on a tree does not compute {', '.join(changed) or f'scales {sorted(scales)}'}")
    return next(iter(scales), None)


def _same_trees(seq_info: tuple[Tensor, Tensor, int] | None, tree: TreeContext) -> bool:
    """Whether Unsloth's packed sequences (lengths, bounds, longest) are the row's trees. 2026.10.9 reads packed
    sequences from positions that begin at 0 again, as those of a forest do. Lengths stay on the device, uncompared."""
    if seq_info is None:
        return True
    lengths, _, longest = seq_info
    return (len(lengths), int(longest)) == (len(tree.lengths), max(tree.lengths))


def _harmless(name: str, option: Any, window: int | None) -> bool:
    if name == "window_size":
        return tuple(option) == _FULL if window is None else tuple(option) == (window - 1, window - 1)
    return bool(option) if name == "causal" else name in ("dropout_p", "softcap") and not option


def _one_dtype(*states: Tensor) -> tuple[Tensor, ...]:
    """Under autocast some adapters (DoRA) return float32 for a part of the three; the base's 16 bits win, as in
    Unsloth's own attention."""
    dtypes = {state.dtype for state in states}
    if len(dtypes) == 1:
        return states
    half = next(iter(sorted(dtypes - {torch.float32}, key=str)))
    return tuple(state.to(half) for state in states)
