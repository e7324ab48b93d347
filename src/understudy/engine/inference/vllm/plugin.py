"""A plugin of vLLM: the same logprobs of sampled tokens, for less computing.

A record needs the logprob of every sampled token, and no alternatives. For these vLLM takes the top 0 of the vocabulary, counts
ranks with a compiled kernel that costs more to enter than to run where the vocabulary and the batch are small, decodes
every token by itself once more, and makes several objects of each. vLLM loads this module in each of its processes (entry point
`vllm.general_plugins`); it does something only in the vLLM that Understudy starts, of the version that it is tested with. The
answers are equal, but for calls that ask for `FLAT_LOGPROBS`: theirs hold `logprobs.token_logprobs`, a plain list, and no `content`.
On a GPU the kernel is left as it is: there it is small beside a step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any

from ...protocol import FLAT_LOGPROBS, UNKNOWN_LOGPROB

if TYPE_CHECKING:
    import torch

SWITCH = "UNDERSTUDY_VLLM_PLUGIN"
"""Set to 1 in the environment of the vLLM that Understudy starts."""
KNOWN_VERSION = "0.32"
SMALL = 1 << 17
"""Logprobs of one step: up to here PyTorch's own operations count ranks sooner than the compiled kernel is entered."""
_TEXTS = 1 << 18
"""Texts of tokens that are kept: more than any vocabulary has."""

Theirs = Callable[..., Any]


def register() -> None:
    """What vLLM calls in each process."""
    if os.environ.get(SWITCH) != "1":
        return
    import vllm

    if not vllm.__version__.startswith(KNOWN_VERSION):
        _say(f"vLLM {vllm.__version__} computes logprobs in its own, slower way: this Understudy knows {KNOWN_VERSION}")
        return
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.platforms import current_platform
    from vllm.v1.engine import logprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.sample.sampler import Sampler

    logprobs.convert_ids_list_to_tokens = texts  # pyright: ignore[reportPrivateImportUsage]  # the name that it calls
    methods: list[tuple[Any, str, Callable[[Theirs], Any]]] = [
        (LogprobsProcessor, "from_new_request", asking),
        (LogprobsProcessor, "_update_sample_logprobs", collecting),
        (OpenAIServingChat, "_create_chat_logprobs", showing),
    ]
    if current_platform.is_cpu():
        methods.append((Sampler, "gather_logprobs", lambda theirs: staticmethod(gathering(theirs))))
    for owner, name, ours in methods:
        setattr(owner, name, ours(getattr(owner, name)))
    _say(f"Understudy's plugin computes the logprobs of sampled tokens in process {os.getpid()}")


def gathering(theirs: Theirs) -> Theirs:
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


class Flat(list[float]):
    """The logprobs of a call that asked for nothing else; vLLM has a dict for each token there."""


def asking(theirs: Theirs) -> Theirs:
    """vLLM's `LogprobsProcessor.from_new_request`, for calls with `FLAT_LOGPROBS` too."""

    @wraps(theirs)
    def from_new_request(tokenizer: Any, request: Any) -> Any:
        made = theirs(tokenizer, request)
        extra: dict[str, Any] | None = request.sampling_params.extra_args
        if made.num_logprobs == 0 and extra and extra.get(FLAT_LOGPROBS):
            made.logprobs = Flat()
        return made

    return from_new_request


def collecting(theirs: Theirs) -> Theirs:
    """vLLM's `LogprobsProcessor._update_sample_logprobs`, which for `Flat` keeps numbers alone."""

    @wraps(theirs)
    def update_sample_logprobs(self: Any, lists: Any) -> None:
        if not isinstance(self.logprobs, Flat):
            return theirs(self, lists)
        values: list[float] = lists.logprobs[:, 0].tolist()
        self.logprobs.extend(values)
        self.cumulative_logprob += sum(values)

    return update_sample_logprobs


def showing(theirs: Theirs) -> Theirs:
    """vLLM's `OpenAIServingChat._create_chat_logprobs`, which finds numbers (all, or the last ones) where a call was `Flat`."""

    @wraps(theirs)
    def create_chat_logprobs(self: Any, token_ids: Any, top_logprobs: Any, *others: Any, **named: Any) -> Any:
        if not top_logprobs or not isinstance(top_logprobs[0], float):
            return theirs(self, token_ids, top_logprobs, *others, **named)
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs

        values = [max(value, UNKNOWN_LOGPROB) for value in top_logprobs]
        return ChatCompletionLogProbs.model_construct(content=[], token_logprobs=values)

    return create_chat_logprobs


def texts(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """As vLLM's `convert_ids_list_to_tokens`: the text of each token alone, decoded once."""
    return [_text(tokenizer, token_id) for token_id in token_ids]


@lru_cache(maxsize=_TEXTS)
def _text(tokenizer: Any, token_id: int) -> str:
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

    return convert_ids_list_to_tokens(tokenizer, [token_id])[0]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # vLLM loads plugins before it makes its loggers
