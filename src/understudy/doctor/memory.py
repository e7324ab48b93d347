"""The memory plan in the doctor: for a card of the options, for this machine's GPU, or for common sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import EngineOptions, MemoryLayout
from ..devices import gpus
from ..errors import ConfigError
from ..memory_plan.card import Card, parse_card
from ..memory_plan.layout import LAYOUTS
from ..memory_plan.page import headline, plan_json, plan_lines
from ..memory_plan.parts import Workload
from ..memory_plan.plan import MemoryPlan, make_plan
from ..memory_plan.published import find_shape
from ..types import Json
from .packages import Check

COMMON = ("16GB", "24GB", "48GB", "80GB")
"""Cards that are planned for on a machine without a GPU."""


@dataclass(frozen=True)
class Planned:
    """The plan for a card. `plan` is None where the base does not fit; `refused` then names the setting to change."""

    card: Card
    plan: MemoryPlan | None
    refused: str = ""

    def lines(self) -> list[str]:
        """The plan as text."""
        return plan_lines(self.plan) if self.plan is not None else [self.refused]

    def as_json(self) -> dict[str, Json]:
        """The plan as JSON."""
        return plan_json(self.plan) if self.plan is not None else {"card": self.card.name, "refused": self.refused}


def plans(
    model: str | None, card: str | None, options: EngineOptions, row_tokens: int | None, layout: str = "auto"
) -> list[Planned]:
    """A plan per card. Raises ConfigError for a base that cannot be read or planned, and for an unknown layout."""
    known: dict[str, MemoryLayout | Literal["auto"]] = {"auto": "auto", **{name: name for name in LAYOUTS}}
    if layout not in known:
        raise ConfigError(f"--memory-layout {layout!r} is unknown: use one of auto, {', '.join(LAYOUTS)}")
    if model is None:
        raise ConfigError("--card needs --model, the base to run on it, as in --model Qwen/Qwen2.5-7B-Instruct")
    shape, work = find_shape(model), Workload.of(options, row_tokens)
    cards = [parse_card(card)] if card is not None else [Card(gpu.name, gpu.total) for gpu in gpus()[:1]]
    planned: list[Planned] = []
    for gpu in cards or map(parse_card, COMMON):
        try:
            planned.append(Planned(gpu, make_plan(model, shape, gpu, work, known[layout])))
        except ConfigError as error:
            planned.append(Planned(gpu, None, str(error)))
    return planned


def plan_checks(planned: list[Planned]) -> list[Check]:
    """One check per plan: the whole plan if there is one, else its headline."""
    checks: list[Check] = []
    for result in planned:
        if result.plan is None:
            checks.append(Check("memory", result.card.name, "warn", result.refused))
        else:
            shown = result.lines() if len(planned) == 1 else [headline(result.plan)]
            checks.append(Check("memory", result.card.name, "ok", "\n".join(shown)))
    return checks
