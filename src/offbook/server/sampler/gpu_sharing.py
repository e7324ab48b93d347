"""How sampler and learner share one GPU.

The memory plan decides, before anything is loaded. `--memory-layout` overrides it.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import psutil

from offbook.base.devices import Gpu
from offbook.base.errors import ConfigError
from offbook.base.server_options import EngineName, EngineOptions, MemoryLayout

from ...memory_plan.parts import CONTEXT, GIB, RESERVE, Card, UnknownShapeError, Workload, find_shape, parse_card
from ...memory_plan.plan import MemoryPlan, make_plan, plan_lines

logger = logging.getLogger(__name__)

FORCING = ("memory_layout", "card")
"""Options that force a layout or a plan, even without a GPU."""
KEPT_FREE = 1.5 * GIB
"""Bytes left free on a shared GPU without a plan, for CUDA contexts and what nvidia-smi does not count."""
SHORTFALL = 2 * GIB
"""Most bytes by which vLLM gets less than the plan says because less is free. If more is missing, something else is
wrong, or the learner is at work; vLLM then refuses the planned share, and is started again."""
MIN_SHARE = 0.1
"""Smallest gpu_memory_utilization at which vLLM is started."""


@dataclass(frozen=True)
class GpuSharing:
    """How sampler and learner share one GPU.

    `plan` is None without vLLM, for a base of unknown architecture, and if several GPUs sample. `gpu`: the shared GPU;
    None if there is none, or several sample.
    """

    layout: MemoryLayout
    plan: MemoryPlan | None = None
    gpu: Gpu | None = None

    @property
    def decoded_calls(self) -> int | None:
        """vLLM's --max-num-seqs; None: the engine's default."""
        return self.plan.decoded_calls if self.plan is not None else None

    @property
    def row_limit(self) -> int | None:
        """Largest row of the learner, in tokens; None: only the job's row_tokens limits it."""
        return self.plan.row_limit if self.plan is not None else None

    def memory_share(self, free: Gpu | None) -> float | None:
        """vLLM's gpu_memory_utilization, from 0 to 1: the plan's, or less if less of the GPU `free` is free now; without
        a plan the share that is free.

        Call it when the learner has loaded and is where it stays during sampling. Returns None without a plan and a
        GPU. Raises ConfigError if too little is free.
        """
        if self.plan is not None:
            total = self.gpu.total if self.gpu is not None else self.plan.card.memory
            lacking = self.plan.sampler - (free.free - CONTEXT) if free is not None else 0
            if 0 < lacking <= SHORTFALL:
                logger.warning(
                    "GPU memory: %.2f GiB less are free than planned; vLLM gets a smaller key-value cache",
                    lacking / GIB,
                )
            less = lacking if 0 < lacking <= SHORTFALL else 0
            return math.floor(1000 * (self.plan.sampler - less) / total) / 1000
        if free is None:
            return None
        share = (free.free - KEPT_FREE) / free.total
        if share < MIN_SHARE:
            raise ConfigError(
                f"GPU {free.index} ({free.name}) has {free.free / GIB:.1f} of {free.total / GIB:.1f} GiB free beside the "
                "learner, which is too little to sample: use a smaller --model, --load-in-4bit, or another GPU with "
                "--inference-gpus"
            )
        return math.floor(1000 * share) / 1000


def share_gpu(engine: EngineName, options: EngineOptions, model: str, gpus: tuple[Gpu, ...]) -> GpuSharing | None:
    """Decide how sampler and learner share `gpus`, and log the plan.

    Returns None without a GPU, unless an option forces a layout. Raises ConfigError, which names the option to
    change, if the plan does not fit or an option does not apply.
    """
    forced = options.changed_among(FORCING)
    if not gpus and not forced:
        return None
    if options.memory_layout == "free_cache" and (engine != "vllm" or not gpus):
        raise ConfigError(
            "--memory-layout free_cache: only vLLM on a GPU can release its key-value cache; use offload or side_by_side"
        )
    if engine != "vllm":
        if options.card is not None:
            raise ConfigError(
                "--card: the memory plan is for vLLM and the learner; use --engine vllm, or leave out --card"
            )
        return GpuSharing("side_by_side" if options.memory_layout == "auto" else options.memory_layout)
    plan = _plan(options, model, gpus)
    if plan is None:
        # Nothing is known of the base, so take the layout that needs the least GPU memory.
        layout = "offload" if options.memory_layout == "auto" else options.memory_layout
        return GpuSharing(layout, gpu=gpus[0] if len(gpus) == 1 else None)
    sharing = GpuSharing(plan.layout, plan, gpus[0] if gpus else None)
    _check_host(plan)
    logger.info(
        "%s\n  vLLM: gpu_memory_utilization %s, --max-num-seqs %d, unless options set them",
        "\n".join(plan_lines(plan)),
        sharing.memory_share(None),
        plan.decoded_calls,
    )
    return sharing


def _plan(options: EngineOptions, model: str, gpus: tuple[Gpu, ...]) -> MemoryPlan | None:
    """The memory plan. None, with a warning that says why, if it cannot be computed."""
    if options.card is None and len(gpus) != 1:
        if gpus:
            logger.warning(
                "No memory plan: %d GPUs sample, and a plan is for one. vLLM sleeps during a step", len(gpus)
            )
        return None
    try:
        shape = find_shape(model)
    except UnknownShapeError as error:
        if options.card is not None:
            raise
        logger.warning(
            "%s. No memory plan: the learner stays in host memory between steps, and vLLM gets the free GPU memory",
            error,
        )
        return None
    card = parse_card(options.card) if options.card is not None else _card(gpus[0])
    if gpus and card.memory > gpus[0].total:
        raise ConfigError(
            f"--card {options.card}: GPU {gpus[0].index} ({gpus[0].name}) has only {gpus[0].total / GIB:.1f} GiB; "
            "name a smaller card"
        )
    return make_plan(model, shape, card, Workload.of(options), options.memory_layout)


def _card(gpu: Gpu) -> Card:
    """The GPU as a card of the plan. `taken` is what a display and other programs hold now, before anything of ours is
    loaded: all beyond RESERVE, which the driver itself counts as used on an idle GPU."""
    return Card(gpu.name, gpu.total, max(0, gpu.total - gpu.free - RESERVE))


def _check_host(plan: MemoryPlan) -> None:
    """Raise ConfigError if the pinned copies of `offload` and the processes need more host memory than is free."""
    available = psutil.virtual_memory().available
    if plan.layout == "offload" and plan.host > available:
        raise ConfigError(
            f"{plan.base} with memory layout {plan.layout} needs {plan.host / GIB:.1f} GiB of host memory, and "
            f"{available / GIB:.1f} GiB are free: use --load-in-4bit, a machine with more memory, or a smaller --model"
        )
