"""The host memory of sampler and learner, in bytes: the pinned copies of a layout, block by block as torch allocates
them, and the processes' own memory."""

from __future__ import annotations

from collections.abc import Iterator

from offbook.base.devices import EXACT_MIB
from offbook.base.server_options import MemoryLayout

from .base_shape import BaseShape
from .card import GIB
from .parts import Workload

PROCESSES = 3 * GIB
"""Assumed: what the learner's process and vLLM's two hold without the copies. With their imports alone, without CUDA, they
hold 1.5 GiB (measured on a CPU)."""
_MIB = 2**20
_EXACT_ABOVE = None if EXACT_MIB is None else EXACT_MIB * _MIB
_PAGE = 4096
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * _MIB, 20 * _MIB
_FLOAT = 4


def pinned_block(size: int, exact_above: int | None = _EXACT_ABOVE) -> int:
    """Bytes that torch allocates for a pinned tensor of `size` bytes: the next power of two, at least a page; the size
    itself above `exact_above` (None: never, which is torch's default).

    >>> pinned_block(3 * 2**20), pinned_block(3 * 2**20, None), pinned_block(5000)
    (3145728, 4194304, 8192)
    """
    if exact_above is not None and size > exact_above:
        return size
    return max(_PAGE, 1 << (size - 1).bit_length())


def host_bytes(layout: MemoryLayout, shape: BaseShape, work: Workload, exact_above: int | None = _EXACT_ABOVE) -> int:
    """Bytes of host memory: the processes' own, and with `offload` the learner's copy, which stays there, and what vLLM
    moves there when it sleeps. `exact_above`: see `pinned_block`."""
    if layout != "offload":
        return PROCESSES
    copies = (*learner_tensors(shape, work), *sampler_segments(shape, work))
    return PROCESSES + sum(count * pinned_block(size, exact_above) for size, count in copies)


def learner_tensors(shape: BaseShape, work: Workload) -> Iterator[tuple[int, int]]:
    """(bytes, count) of the learner's weights, LoRA and optimizer moments. A weight in 4 bits has its quantisation
    scales beside it."""
    b, layers = work.bytes_per_value, shape.layers
    for inputs, outputs in shape.linears:
        weights = inputs * outputs
        if work.four_bit:
            yield weights // 2, layers
            yield weights // 64, layers
            yield _FLOAT * weights // (64 * 256), layers
        else:
            yield weights * b, layers
        for width in (inputs, outputs):
            yield work.rank * width * _FLOAT, 3 * layers  # the LoRA and AdamW's two moments
    yield shape.vocabulary * shape.hidden * b, 1 if shape.tied else 2
    yield from ((width * b, layers) for width in _layer_vectors(shape))
    yield shape.hidden * b, 1


def sampler_segments(shape: BaseShape, work: Workload) -> Iterator[tuple[int, int]]:
    """(bytes, count) of the segments of GPU memory that hold vLLM's weights and LoRA slots. Its sleep copies them one by
    one (`device_allocator/cumem.py` of vLLM 0.32).

    As torch's CUDA allocator cuts them: tensors above 10 MiB have their own, in steps of 2 MiB; those above 1 MiB share
    segments of 20 MiB, smaller ones segments of 2 MiB. vLLM fuses q, k, v, and gate, up."""
    b, layers = work.bytes_per_value, shape.layers
    h, i = shape.hidden, shape.intermediate
    fused = (h * (shape.q_width + 2 * shape.kv_width), shape.q_width * h, 2 * h * i, h * i)
    tensors = [(weights * b, layers) for weights in fused]
    tensors.append((shape.vocabulary * h * b, 1 if shape.tied else 2))
    tensors += [(width * b, layers) for width in _layer_vectors(shape)]
    slots = work.max_loras * work.rank * b
    tensors += [(slots * width, layers) for pair in shape.linears for width in pair]
    if tables := shape.slot_parameters(work.rank) - shape.lora_parameters(work.rank):
        tensors.append((work.max_loras * tables * b, 1))
    for size, count in tensors:
        if size > _LARGE_SEGMENT // 2:
            yield -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT, count
    for segment, least, most in ((_LARGE_SEGMENT, _MIB, _LARGE_SEGMENT // 2), (_SMALL_SEGMENT, 0, _MIB)):
        held = sum(size * count for size, count in tensors if least < size <= most)
        yield segment, -(-held // segment)


def _layer_vectors(shape: BaseShape) -> tuple[int, ...]:
    """Widths of a layer's norms and biases."""
    norms = (shape.hidden, shape.hidden) + ((shape.head_dim, shape.head_dim) if shape.family == "qwen3" else ())
    attention = (shape.q_width, shape.kv_width, shape.kv_width) if shape.attention_bias else ()
    output = (shape.hidden,) if shape.output_bias else ()
    mlp = (shape.intermediate, shape.intermediate, shape.hidden) if shape.mlp_bias else ()
    return norms + attention + output + mlp
