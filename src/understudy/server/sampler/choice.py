"""Which engine samples and on what: `auto` resolved, and the options as the sampler takes them."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ...config import OF_EMBEDDED, OF_VLLM, EngineName, EngineOptions
from ...devices import Gpu, chosen, gpus
from ...engine.protocol import SAMPLER_MODULES
from ...errors import ConfigError
from ...extras import install_command
from ..models.registration import MAX_RANK
from .child import ChildSampler
from .pool import SamplerPool
from .quirks import Quirks
from .running import RunningSampler, key
from .sampler import Sampler
from .transport import SERVED_NAME

log = logging.getLogger(__name__)

KEPT_FREE = 1.5 * 2**30
"""Bytes of a shared GPU that neither vLLM nor the sleeping learner holds: CUDA's own contexts and what nvidia-smi misses."""
LEAST_SHARE = 0.1
MAX_STALENESS = 62
"""Of TrainConfig; the embedded engine has no limit of its own."""


@dataclass(frozen=True)
class EngineChoice:
    """What samples. `shares_gpu`: the learner uses the same GPU, so that vLLM sleeps during a step."""

    name: EngineName
    options: EngineOptions
    shares_gpu: bool = False
    quirks: Quirks = field(default_factory=Quirks)

    @property
    def max_rank(self) -> int:
        """Of an adapter."""
        return self.options.max_lora_rank if self.name == "vllm" and not self.options.vllm_url else MAX_RANK

    @property
    def max_staleness(self) -> int:
        """How many steps old calls may be without waiting for each other: vLLM holds so many adapters, and the newest two
        are needed at each swap."""
        return self.options.max_loras - 2 if self.name == "vllm" else MAX_STALENESS

    def described(self) -> str:
        """What samples and where, in a few words."""
        if self.options.vllm_url:
            return f"vLLM, which runs already at {', '.join(self.options.vllm_url)}"
        sampling, training = (
            ",".join(map(str, each)) for each in (self.options.inference_gpus, self.options.train_gpus)
        )
        where = f" on GPU {sampling}" if sampling else ""
        apart = f", training on GPU {training}" if training and training != sampling else ""
        shared = ", which sleeps while the learner uses the GPU" if self.shares_gpu else ""
        return f"{'vLLM' if self.name == 'vllm' else 'embedded'}{where}{apart}{shared}"

    def command(self, base: Path, socket: Path) -> list[str]:
        """What samples from `base` on `socket`. Raises ConfigError."""
        words = [sys.executable, "-m", SAMPLER_MODULES[self.name], "--model", str(base)]
        words += ["--served-model-name", SERVED_NAME, "--uds", str(socket), "--parent-pid", str(os.getpid())]
        return words + self._words()

    def _words(self) -> list[str]:
        """The options beside model and address. A shared GPU's memory is measured."""
        options = self.options
        words = ["--device", options.device, "--dtype", options.dtype]
        values: dict[str, object] = {
            "max-batch": options.max_batch,
            "max-model-len": options.max_model_len,
            "threads": options.threads,
        }
        if self.name == "embedded":
            values |= {"max-string": options.max_string, "max-items": options.max_items}
        if self.name == "vllm":
            values |= {
                "gpus": ",".join(str(index) for index in options.inference_gpus) or None,
                "max-loras": options.max_loras,
                "max-lora-rank": options.max_lora_rank,
                "tool-call-parser": options.tool_call_parser,
                "reasoning-parser": options.reasoning_parser,
                "engine-args": json.dumps(options.engine_args) if options.engine_args else None,
            }
            if self.shares_gpu:
                words.append("--shares-gpu")
                values["memory-share"] = f"{self._free_share():.3f}"
        return words + [
            word for flag, value in values.items() if value is not None for word in (f"--{flag}", str(value))
        ]

    def sampler(self, base: Path, log_path: Path) -> Sampler:
        """The sampler, not started."""
        if not self.options.vllm_url:
            return ChildSampler(partial(self.command, base), log_path)
        members = [RunningSampler(url) for url in self.options.vllm_url]
        return members[0] if len(members) == 1 else SamplerPool(members)

    def _free_share(self) -> float:
        """Of the GPU's memory: what is free now, with the learner's base on it. Raises ConfigError when that is too little."""
        gpu = min(chosen(self.options.inference_gpus, gpus(), "inference-gpus"), key=lambda gpu: gpu.free)
        share = (gpu.free - KEPT_FREE) / gpu.total
        if share < LEAST_SHARE:
            raise ConfigError(
                f"GPU {gpu.index} ({gpu.name}) has {gpu.free / 2**30:.1f} of {gpu.total / 2**30:.1f} GiB free beside the "
                "learner, which is too little to sample: take a smaller --model, --load-in-4bit, or another GPU with "
                "--inference-gpus"
            )
        return share


def choose(options: EngineOptions, *, trains: bool) -> EngineChoice:
    """The engine that the options mean on this machine. Raises ConfigError."""
    if options.vllm_url:
        key()  # one that cannot be sent is told at once
        return EngineChoice("vllm", options, quirks=Quirks(grammar_for_strict_tools=True, flat_logprobs=True))
    found = () if options.device == "cpu" else gpus()
    sampling = options.inference_gpus or options.train_gpus
    training = options.train_gpus or sampling[:1]
    for option, indices in (("inference-gpus", options.inference_gpus), ("train-gpus", options.train_gpus)):
        if indices:
            chosen(indices, found, option)
    name = options.engine if options.engine != "auto" else _automatic(found)
    if name == "vllm" and found and not sampling and options.device in ("auto", "cuda"):
        sampling = training = (found[0].index,)  # both sides name it: CUDA may number GPUs in another order
    options = options.model_copy(update={"inference_gpus": sampling, "train_gpus": training})
    if name == "embedded":
        if unused := options.given(OF_VLLM):
            log.warning("The embedded engine samples, and has no use for %s", ", ".join(unused))
        return EngineChoice(name, options)
    if unused := options.given(OF_EMBEDDED):
        log.warning("vLLM samples, and has no use for %s", ", ".join(unused))
    if not found:
        log.warning("vLLM on a CPU ends when many calls have a seed: seeds are left out")
    shares = bool(found) and trains and set(training) <= set(sampling)
    return EngineChoice(
        name, options, shares, Quirks(grammar_for_strict_tools=True, no_seed=not found, flat_logprobs=True)
    )


def _automatic(found: tuple[Gpu, ...]) -> EngineName:
    if not found:
        return "embedded"
    if find_spec("vllm") is None:
        log.warning(
            "A GPU is here and vLLM is not: the embedded engine samples, which is slower. %s", install_command("vllm")
        )
        return "embedded"
    return "vllm"
