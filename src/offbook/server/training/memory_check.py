"""Compares the memory plan with the measured peaks of a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ...memory_plan.card import GIB
from ...memory_plan.plan import MemoryPlan

logger = logging.getLogger(__name__)


class MemoryCheck:
    """Compares the peaks of each step with a plan, and logs the first comparison."""

    def __init__(self, plan: MemoryPlan | None) -> None:
        """Without a plan, nothing is compared."""
        self._plan = plan
        self._logged = False

    def over_plan(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics `memory/learner_over_plan` and `memory/gpu_over_plan`: measured minus planned peak, in GiB.

        Empty without a plan, or if the learner did not measure its memory.
        """
        if self._plan is None or "memory/learner_peak" not in metrics:
            return {}
        planned = {"learner": self._plan.learner_peak / GIB, "gpu": _planned_gpu(self._plan) / GIB}
        over = {side: metrics[f"memory/{side}_peak"] - expected for side, expected in planned.items()}
        if not self._logged:
            self._logged = True
            logger.log(
                logging.WARNING if max(over.values()) > 0 else logging.INFO,
                "Peak memory of the first step, in GiB: the learner's tensors %.2f, planned %.2f (%+.2f); the GPU %.2f, "
                "planned %.2f (%+.2f). %s",
                metrics["memory/learner_peak"],
                planned["learner"],
                over["learner"],
                metrics["memory/gpu_peak"],
                planned["gpu"],
                over["gpu"],
                "If a step runs out of memory, plan for less with a smaller --card" if max(over.values()) > 0 else "",
            )
        return {f"memory/{side}_over_plan": value for side, value in over.items()}


def _planned_gpu(plan: MemoryPlan) -> int:
    """Planned bytes on the GPU at the peak of a step, including other programs.

    Side by side, vLLM's KV cache takes all that is left.
    """
    return plan.card.memory if plan.layout == "side_by_side" else plan.step + plan.card.taken
