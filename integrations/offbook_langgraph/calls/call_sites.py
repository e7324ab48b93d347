"""Where in the app a call is made: its line, and whether an evaluation package makes it for a judge."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import FrameType

from offbook.client.rollouts.failures import is_app_file

JUDGES = (
    "openevals",
    "agentevals",
    "autoevals",
    "langchain.evaluation",
    "langchain_classic.evaluation",
    "langsmith.evaluation.evaluator",
    "langsmith.evaluation.llm_evaluator",
    "deepeval.metrics",
    "deepeval.models",
    "ragas.metrics",
    "ragas.llms",
    "ragas.evaluation",
    "phoenix.evals",
    "trulens.feedback",
    "trulens.providers",
    "mlflow.metrics",
    "mlflow.genai.judges",
    "mlflow.genai.scorers",
    "opik.evaluation.metrics",
    "azure.ai.evaluation",
    "pydantic_evals.evaluators",
    "offbook.rewards",
)
"""Modules whose code calls models to judge, and that run no part of the app itself."""
SIMULATORS = ("openevals.simulators",)
"""Modules that call models for a simulated user, and that also run the app: a call with a line of the app below is the app's."""
ROLLOUT = "offbook_langgraph.training."
"""Begins the names of the modules that run a rollout. What called them is no part of it."""
UNKNOWN_LINE = "(no line of the app's own is on the stack)"


@dataclass(frozen=True)
class CallSite:
    """The innermost line of the app that made a call, and the evaluation package that made it for a judge; None: neither is
    on the call stack."""

    line: str | None
    judge: str | None

    def within(self, outer: CallSite) -> CallSite:
        """This site, completed by that of a run around it: LangChain runs the steps of a chain in tasks of their own."""
        return CallSite(self.line or outer.line, self.judge or outer.judge)


def call_site() -> CallSite:
    """The site of the call that is being made: a walk up the call stack, to the beginning of the rollout."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # cheaper than a traceback
    line, judge = None, None
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.startswith(ROLLOUT):
            break
        if judge is None and _judges(module, line is None):
            judge = module.partition(".")[0]
        if line is None and is_app_file(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        if line is not None and judge is not None:
            break
        frame = frame.f_back
    return CallSite(line, judge)


@functools.cache
def _judges(module: str, innermost: bool) -> bool:
    """Whether a module is of a judge. `innermost`: no line of the app is below it on the stack."""
    if any(_within(module, name) for name in SIMULATORS):
        return innermost
    return any(_within(module, name) for name in JUDGES)


def _within(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")
