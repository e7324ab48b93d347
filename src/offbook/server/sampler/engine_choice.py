"""Which engine samples, on which GPUs, and with which command line."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from offbook.base.config import MAX_RANK
from offbook.base.devices import Gpu, automatic_dtype, chosen, gpus, visible_to
from offbook.base.errors import ConfigError, install_command
from offbook.base.server_options import OF_VLLM, EngineName, EngineOptions

from ...engine.protocol import SAMPLER_MODULES, prompt_date_words
from ..base_model import BaseModelPath
from .child_sampler import ChildSampler
from .gpu_sharing import FORCING, GpuSharing, share_gpu
from .pool import Sampler, SamplerCalls, SamplerPool
from .running_sampler import RunningSampler, key
from .supervised import SupervisedSampler
from .transport import SERVED_NAME, Quirks

logger = logging.getLogger(__name__)

_VLLM_QUIRKS = Quirks(grammar_for_strict_tools=True, flat_logprobs=True, stream_blocks=True, thinking_budgets=True)


@dataclass(frozen=True)
class Replica:
    """A process of the sampler. `gpus`: its own, by nvidia-smi's index; empty: the device of the options. `shares_gpu`: the
    learner uses one of them too, so it follows the memory layout."""

    number: int = 0
    gpus: tuple[int, ...] = ()
    shares_gpu: bool = True


@dataclass(frozen=True)
class EngineChoice:
    """The inference engine of a server, with `auto` resolved.

    `sharing`: how sampler and learner share one GPU; None if they do not share one. `quirks`: what the gateway must
    compensate for.
    """

    name: EngineName
    options: EngineOptions
    sharing: GpuSharing | None = None
    quirks: Quirks = field(default_factory=Quirks)

    @property
    def max_rank(self) -> int:
        """Largest rank of an adapter that the engine accepts. A running vLLM server checks ranks itself."""
        return self.options.max_lora_rank if self.name == "vllm" and not self.options.vllm_url else MAX_RANK

    def described(self) -> str:
        """The engine, its GPUs and the memory layout, for people."""
        if self.options.vllm_url:
            return f"vLLM, already running at {', '.join(self.options.vllm_url)}"
        replicas = self.replicas
        sampling = ", ".join(",".join(map(str, replica.gpus)) for replica in replicas)
        training = ",".join(map(str, self.options.train_gpus))
        count = f", {len(replicas)} replicas" if len(replicas) > 1 else ""
        where = count + (f" on GPU {sampling}" if self.options.inference_gpus else "")
        apart = f", training on GPU {training}" if training and training != sampling else ""
        shared = f", memory layout {self.sharing.layout}" if self.sharing else ""
        return f"{'vLLM' if self.name == 'vllm' else 'embedded'}{where}{apart}{shared}"

    def free_gpu(self, calls: SamplerCalls) -> AbstractAsyncContextManager[None]:
        """Inside the block, a train step has the GPU memory that the memory layout assigns to it.

        `free_cache` and `offload` put vLLM to sleep. Otherwise this does nothing.
        """
        if self.name == "vllm" and self.sharing is not None and self.sharing.layout != "side_by_side":
            return calls.asleep(keep_weights=self.sharing.layout == "free_cache")
        return nullcontext()

    def for_base(self, *, plain_answers: bool, template: frozenset[str] | None = None) -> EngineChoice:
        """The choice for a base model whose answers are read without a reasoning parser, or (False) perhaps with one, and
        whose chat templates have these words."""
        blocks = self.quirks.stream_blocks and plain_answers
        return replace(self, quirks=replace(self.quirks, stream_blocks=blocks, template=template))

    def _dtype(self) -> str:
        if self.options.dtype != "auto":
            return self.options.dtype
        present = () if self.options.device == "cpu" else gpus()
        return automatic_dtype([gpu.capability for gpu in _sampling_gpus(self.options, present)])

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The processes that sample; one if vLLM runs already."""
        gpus, count = self.options.inference_gpus, self.options.samplers
        size = len(gpus) // count
        groups = [gpus[number * size : (number + 1) * size] for number in range(count)]
        training = set(self.options.train_gpus)
        return tuple(Replica(number, own, not own or bool(training & set(own))) for number, own in enumerate(groups))

    def command(self, base: Path, socket: Path, replica: Replica | None = None) -> list[str]:
        """The command line of a replica, or of the first, for the model folder `base` on a Unix socket.

        Raises ConfigError if too little GPU memory is free.
        """
        words = [sys.executable, "-m", SAMPLER_MODULES[self.name], "--model", str(base)]
        words += ["--served-model-name", SERVED_NAME, "--uds", str(socket), "--parent-pid", str(os.getpid())]
        return words + self._words(replica or self.replicas[0])

    def _words(self, replica: Replica) -> list[str]:
        """The options other than model and address. On a shared GPU, the memory plan sets vLLM's share."""
        options, sharing = self.options, self.sharing if replica.shares_gpu else None
        several = options.samplers > 1
        words = ["--device", options.device, "--dtype", self._dtype() if several else options.dtype]
        values: dict[str, object] = {
            "max-batch": options.max_batch or (None if sharing is None else sharing.decoded_calls),
            "max-model-len": options.max_model_len,
            "threads": options.threads or (_share_of_cores(options.samplers) if several and not replica.gpus else None),
        }
        words += prompt_date_words(options.prompt_date)
        if self.name == "vllm":
            values |= {
                "gpus": ",".join(map(str, replica.gpus)) or None,
                "replica": replica.number or None,
                "replicas": options.samplers if several else None,
                "max-loras": options.max_loras,
                "max-lora-rank": options.max_lora_rank,
                "tool-call-parser": options.tool_call_parser,
                "reasoning-parser": options.reasoning_parser,
                "engine-args": json.dumps(options.engine_args) if options.engine_args else None,
            }
            if sharing is not None:
                words += ["--shares-gpu"] if sharing.layout != "side_by_side" else []
                values["memory-share"] = sharing.memory_share(self._least_free(replica))
        return words + [
            word for flag, value in values.items() if value is not None for word in (f"--{flag}", str(value))
        ]

    def sampler(self, base: BaseModelPath, log_path: Path) -> Sampler:
        """Create the sampler for a base; `start` starts it. Its output is appended to `log_path`; that of
        replica 1 of several to a file such as sampler-1.log beside it."""
        if self.options.vllm_url:
            members: list[SupervisedSampler] = [RunningSampler(url) for url in self.options.vllm_url]
        else:
            members = [self._child(base.path, log_path, replica) for replica in self.replicas]
        return members[0] if len(members) == 1 else SamplerPool(members)

    def _child(self, base: Path, log_path: Path, replica: Replica) -> ChildSampler:
        shown = ",".join(map(str, replica.gpus))
        name, log = self._shown(replica, log_path, f" (GPU {shown})" if shown else "")
        child = ChildSampler(
            partial(self.command, base, replica=replica),
            log,
            name=name,
            environment=visible_to(replica.gpus) if self.name == "embedded" and shown else None,
        )
        child.shares_gpu = replica.shares_gpu
        return child

    def _shown(self, replica: Replica, log_path: Path, where: str = "") -> tuple[str, Path]:
        if self.options.samplers == 1:
            return "the sampler", log_path
        name = f"replica {replica.number} of the sampler{where}"
        return name, log_path.with_stem(f"{log_path.stem}-{replica.number}")

    def _least_free(self, replica: Replica) -> Gpu | None:
        return min(_sampling_gpus(self.options, gpus(), replica.gpus), key=lambda gpu: gpu.free, default=None)


def choose(options: EngineOptions, model: str, *, trains: bool) -> EngineChoice:
    """Resolve the engine options on this machine. `trains`: the server also has a learner.

    If both share a GPU, this reads the config.json of the base `model` to plan the memory. Raises ConfigError for
    GPUs that do not exist and for a plan that does not fit.
    """
    if options.vllm_url:
        key()  # raises now, not at the first call, for an unusable key
        return EngineChoice("vllm", options, quirks=_VLLM_QUIRKS)
    present = () if options.device == "cpu" else gpus()
    name = options.engine if options.engine != "auto" else _automatic(present)
    options = _placed(name, options, present)
    sampling, training = options.inference_gpus, options.train_gpus
    sharing = None
    if trains and set(training) <= set(sampling):
        shared = next((r.gpus for r in EngineChoice(name, options).replicas if r.shares_gpu), ())
        sharing = share_gpu(name, options, model, _sampling_gpus(options, present, shared) if name == "vllm" else ())
    elif unused := options.changed_among(FORCING):
        logger.warning("%s: ignored, since sampler and learner share no GPU here", ", ".join(unused))
    if name == "embedded":
        if unused := options.changed_among(OF_VLLM):
            logger.warning("%s: ignored by the embedded engine; only vLLM uses it", ", ".join(unused))
        return EngineChoice(name, options, sharing)
    if not present:
        logger.warning("vLLM on a CPU crashes if many calls have a seed: seeds are not sent to it")
    return EngineChoice(
        name, options, sharing, replace(_VLLM_QUIRKS, no_seed=not present, stream_blocks=not options.reasoning_parser)
    )


def _placed(name: EngineName, options: EngineOptions, present: tuple[Gpu, ...]) -> EngineOptions:
    """The options with the GPUs of both sides and the device. Raises ConfigError as `choose`."""
    if present and options.samplers > 1 and not options.inference_gpus:
        raise ConfigError(f"--replicas {options.samplers}: name a GPU for each, such as --inference-gpus 0,1")
    sampling = options.inference_gpus or options.train_gpus
    training = options.train_gpus or sampling[:1]
    for option, indices in (("inference-gpus", options.inference_gpus), ("train-gpus", options.train_gpus)):
        if indices:
            chosen(indices, present, option)
    if name == "vllm" and present and not sampling and options.device in ("auto", "cuda"):
        sampling = training = (present[0].index,)  # explicit on both sides, since CUDA may order GPUs differently
    # A GPU was chosen: neither process may fall back to the CPU because its torch cannot use it.
    device = "cuda" if present and training and options.device == "auto" else options.device
    return options.model_copy(update={"inference_gpus": sampling, "train_gpus": training, "device": device})


def _sampling_gpus(
    options: EngineOptions, present: tuple[Gpu, ...], indices: tuple[int, ...] | None = None
) -> tuple[Gpu, ...]:
    """The GPUs of the sampler, or those of `indices`: the configured ones, or the one of `device`."""
    if indices or options.inference_gpus:
        return chosen(indices or options.inference_gpus, present, "inference-gpus")
    index = int(options.device.partition(":")[2] or 0)
    return present[index : index + 1]


def _share_of_cores(count: int) -> int:
    return max(1, (os.cpu_count() or 1) // count)


def _automatic(present: tuple[Gpu, ...]) -> EngineName:
    if not present:
        return "embedded"
    if find_spec("vllm") is None:
        logger.warning(
            "There is a GPU, but vLLM is not installed: using the embedded engine, which is slower. %s",
            install_command("vllm"),
        )
        return "embedded"
    return "vllm"
