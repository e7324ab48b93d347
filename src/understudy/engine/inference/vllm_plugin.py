"""A plugin of vLLM: the same logprobs of sampled tokens, for less computing.

A record needs the logprob of every sampled token, and no alternatives. For these vLLM takes the top 0 of the vocabulary, counts
ranks with a compiled kernel that costs more to enter than to run where the vocabulary and the batch are small, and decodes
every token by itself once more. vLLM loads this module in each of its processes (entry point `vllm.general_plugins`);
it does something only in the vLLM that Understudy starts, of the version that it is tested with. The answers are equal.
On a GPU only the decoding is replaced: there the kernel is small beside a step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SWITCH = "UNDERSTUDY_VLLM_PLUGIN"
"""Set to 1 in the environment of the vLLM that Understudy starts."""
KNOWN_VERSION = "0.32"
SMALL = 1 << 17
"""Logprobs of one step: up to here PyTorch's own operations count ranks sooner than the compiled kernel is entered."""
_TEXTS = 1 << 18
"""Texts of tokens that are kept: more than any vocabulary has."""

Gather = Callable[..., Any]


def register() -> None:
    """What vLLM calls in each process."""
    if os.environ.get(SWITCH) != "1":
        return
    import vllm

    if not vllm.__version__.startswith(KNOWN_VERSION):
        _say(f"vLLM {vllm.__version__} computes logprobs in its own, slower way: this Understudy knows {KNOWN_VERSION}")
        return
    from vllm.platforms import current_platform
    from vllm.v1.engine import logprobs
    from vllm.v1.sample.sampler import Sampler

    logprobs.convert_ids_list_to_tokens = texts  # pyright: ignore[reportPrivateImportUsage]  # the name that it calls
    if current_platform.is_cpu():
        Sampler.gather_logprobs = staticmethod(gathering(Sampler.gather_logprobs))
    _say(f"Understudy's plugin computes the logprobs of sampled tokens in process {os.getpid()}")


def gathering(theirs: Gather) -> Gather:
    """vLLM's `Sampler.gather_logprobs`, sooner done where few logprobs are looked through and no alternatives are asked for."""

    @wraps(theirs)
    def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        if num_logprobs or logprobs.numel() > SMALL:
            return theirs(logprobs, num_logprobs, token_ids)
        import torch
        from vllm.v1.outputs import LogprobsTensors

        ids = token_ids.unsqueeze(-1)
        found = logprobs.gather(-1, ids)
        return LogprobsTensors(ids.to(torch.int32), found, (logprobs >= found).sum(-1))

    return gather_logprobs


def texts(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """As vLLM's `convert_ids_list_to_tokens`: the text of each token alone, decoded once."""
    return [_text(tokenizer, token_id) for token_id in token_ids]


@lru_cache(maxsize=_TEXTS)
def _text(tokenizer: Any, token_id: int) -> str:
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

    return convert_ids_list_to_tokens(tokenizer, [token_id])[0]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # vLLM loads plugins before it makes its loggers
