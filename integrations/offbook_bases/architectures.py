"""The configuration and the weights of the supported families: from GGUF's names and layout to transformers'."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from offbook.base.errors import ConfigError
from offbook.base.types import Json

from .gguf_file import Floats, GgufFile, Tensor

_READ = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size", "rope.freq_base",
    "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon",
}  # fmt: skip
"""The keys of an architecture that are read. Another one may change what the model computes, so it is refused."""
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Family:
    """How llama.cpp writes a family.

    `interleaved`: the rows of q and k in a head are pairs of a rotation, where transformers has first halves, then second ones.
    `norm_offset`: what was added to the weights of norms. `biases`: the projections with a bias. `keys`: further keys that are read.
    """

    model_type: str
    class_name: str
    norms: dict[str, str] = field(default_factory=lambda: _NORMS)
    head_norms: dict[str, str] = field(default_factory=dict[str, str])
    biases: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()
    interleaved: bool = False
    norm_offset: float = 0.0
    rope_base: float = 10_000.0


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM", interleaved=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", biases=("attn_q", "attn_k", "attn_v")),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", head_norms=_HEAD_NORMS),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        norms=_GEMMA_NORMS,
        head_norms=_HEAD_NORMS,
        keys=frozenset({"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"}),
        norm_offset=1.0,
        rope_base=1_000_000.0,
    ),
}
"""`general.architecture` -> its family. SmolLM and SmolLM2 are llama's."""


@dataclass(frozen=True)
class Weight:
    """A tensor by its name in transformers. `rows`: the order of its rows in the file; None: the same."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    rows: npt.NDArray[np.intp] | None = None
    offset: float = 0.0

    def part(self, start: int, stop: int) -> Floats:
        """The rows from `start` to `stop`."""
        values = self.tensor.values(slice(start, stop) if self.rows is None else self.rows[start:stop])
        return values - np.float32(self.offset) if self.offset else values


@dataclass(frozen=True)
class Architecture:
    """A model's family, config.json and weights."""

    config: dict[str, Json]
    weights: list[Weight]

    @property
    def parameters(self) -> int:
        """How many numbers the weights have."""
        return sum(math.prod(weight.shape) for weight in self.weights)


def read_architecture(file: GgufFile) -> Architecture:
    """Read the configuration, and find every tensor with the shape that it demands. Raises ConfigError."""
    name = file.text("general.architecture")
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(
            f"{file.path.name}: the architecture {name[:64]!r} is not supported: use one of {', '.join(FAMILIES)}"
        )
    unread = [
        key
        for key in file.keys
        if key.startswith(f"{name}.") and key.removeprefix(f"{name}.") not in _READ | family.keys
    ]
    if unread:
        raise ConfigError(
            f"{file.path.name}: the meaning of {unread[0][:100]!r} is unknown, so the model is not converted"
        )
    sizes = _Sizes.read(file, name)
    tied = "output.weight" not in file.tensors
    weights = list(_weights(file, family, sizes, tied))
    unused = file.tensors.keys() - {weight.tensor.name for weight in weights} - {"rope_freqs.weight"}
    if unused:
        raise ConfigError(
            f"{file.path.name}: the tensor {min(unused)[:100]!r} has no place in a model of the family {name}"
        )
    vocabulary = weights[0].shape[0]
    config: dict[str, Json] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head,
        "max_position_embeddings": file.whole(f"{name}.context_length", 2**31),
        "rms_norm_eps": _rounded(file.real(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _rounded(file.real(f"{name}.rope.freq_base", family.rope_base)),
        "rope_scaling": _rope_scaling(file, name, sizes.head),
        "tie_word_embeddings": tied,
        "attention_bias": False,
    }
    if family.model_type == "gemma3_text":
        config |= _gemma_fields(file, sizes)
    else:
        config |= {"hidden_act": "silu"}
    return Architecture(config, weights)


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int

    @classmethod
    def read(cls, file: GgufFile, name: str) -> _Sizes:
        hidden = file.whole(f"{name}.embedding_length", 2**17)
        heads = file.whole(f"{name}.attention.head_count", 2**12)
        kv_heads = file.whole(f"{name}.attention.head_count_kv", heads, default=heads)
        head = file.whole(f"{name}.attention.key_length", 2**12, default=max(1, hidden // heads))
        if heads % kv_heads or head % 2:
            raise file.fault(
                f"{heads} heads, {kv_heads} of keys and values, {head} values per head do not fit together"
            )
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := file.whole(f"{name}.{key}", 2**12, default=head)) != head:
                raise file.fault(f"{name}.{key} is {other}, and {head} values per head are supported only")
        inner = file.whole(f"{name}.feed_forward_length", 2**20)
        return cls(hidden, inner, file.whole(f"{name}.block_count", 1000), heads, kv_heads, head)


def _weights(file: GgufFile, family: Family, sizes: _Sizes, tied: bool):
    """The weights in the order of transformers, the embeddings first."""
    queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    shapes = {
        "attn_q": (queries, sizes.hidden),
        "attn_k": (keys, sizes.hidden),
        "attn_v": (keys, sizes.hidden),
        "attn_output": (sizes.hidden, queries),
        "ffn_gate": (sizes.inner, sizes.hidden),
        "ffn_up": (sizes.inner, sizes.hidden),
        "ffn_down": (sizes.hidden, sizes.inner),
    }

    def weight(name: str, source: str, shape: tuple[int, ...], offset: float = 0.0, order: bool = False) -> Weight:
        tensor = file.tensors.get(source)
        if tensor is None:
            raise file.fault(f"it has no tensor {source}")
        if tensor.shape != shape:
            raise file.fault(f"tensor {source} has the shape {tensor.shape}, and its keys demand {shape}")
        rows = _halves_first(shape[0], sizes.head) if order else None
        return Weight(name, tensor, shape, rows, offset)

    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None else 0
    yield weight("model.embed_tokens.weight", "token_embd.weight", (rows, sizes.hidden))
    for layer in range(sizes.layers):
        here, there = f"blk.{layer}", f"model.layers.{layer}"
        for source, name in _PROJECTIONS.items():
            order = family.interleaved and source in ("attn_q", "attn_k")
            yield weight(f"{there}.{name}.weight", f"{here}.{source}.weight", shapes[source], order=order)
            if source in family.biases:
                yield weight(f"{there}.{name}.bias", f"{here}.{source}.bias", shapes[source][:1])
        for source, name in (*family.norms.items(), *family.head_norms.items()):
            size = sizes.head if source in family.head_norms else sizes.hidden
            yield weight(f"{there}.{name}.weight", f"{here}.{source}.weight", (size,), family.norm_offset)
    yield weight("model.norm.weight", "output_norm.weight", (sizes.hidden,), family.norm_offset)
    if not tied:
        yield weight("lm_head.weight", "output.weight", (rows, sizes.hidden))


def _halves_first(rows: int, head: int) -> npt.NDArray[np.intp]:
    """The file's rows in transformers' order: of a head's pairs, first all first members, then all second ones.

    >>> _halves_first(8, 4).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return np.arange(rows).reshape(-1, head // 2, 2).swapaxes(1, 2).reshape(rows)


def _rounded(value: float) -> float:
    """A float32 as the decimal that was meant.

    >>> _rounded(9.999999747378752e-06)
    1e-05
    """
    return float(f"{value:.7g}")


def _rope_scaling(file: GgufFile, name: str, head: int) -> dict[str, Json] | None:
    kind = file.text(f"{name}.rope.scaling.type", "none")
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        if kind != "none":
            raise file.fault(f"rope_freqs.weight beside the rope scaling {kind[:32]!r} is unknown")
        return _llama3_scaling(file, factors, head, file.real(f"{name}.rope.freq_base", 10_000.0))
    if kind == "none":
        return None
    factor = _rounded(file.real(f"{name}.rope.scaling.factor"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = file.whole(f"{name}.rope.scaling.original_context_length", 2**31)
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise file.fault(f"the rope scaling {kind[:32]!r} is not supported (linear and yarn are)")


def _llama3_scaling(file: GgufFile, tensor: Tensor, head: int, base: float) -> dict[str, Json]:
    """The scaling of Llama 3.1 and later. The file has the factors that follow from it, so the published settings are tried."""
    if tensor.shape == (head // 2,):
        factors = tensor.values(slice(None)).reshape(-1)
        turns = 8192 / (2 * np.pi * base ** (np.arange(head // 2) * 2 / head))  # of a pair, in the original context
        smooth = np.clip((turns - 1.0) / 3.0, 0.0, 1.0)
        for factor in (8.0, 32.0):
            if np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
                fixed: dict[str, Json] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
                return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": 8192, **fixed}
    raise file.fault("rope_freqs.weight has none of the factors of Llama 3.1 (8) and 3.2 (32)")


def _gemma_fields(file: GgufFile, sizes: _Sizes) -> dict[str, Json]:
    pattern = file.whole("gemma3.attention.sliding_window_pattern", 1000, default=6)
    kinds = ["full_attention" if layer % pattern == 0 else "sliding_attention" for layer in range(1, sizes.layers + 1)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": sizes.hidden // sizes.heads if sizes.layers == 62 else sizes.head,  # 62: the 27B
        "sliding_window": file.whole("gemma3.attention.sliding_window", 2**31),
        "layer_types": kinds,
        "rope_local_base_freq": _rounded(file.real("gemma3.rope.freq_base_swa", 10_000.0)),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
