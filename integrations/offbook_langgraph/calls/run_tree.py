"""LangChain's run tree during a capture: the parent of every run, the agent and the line of the app that a call belongs to, timed tools."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command

from offbook import Trajectory
from offbook.base import clock
from offbook.base.redaction import error_text
from offbook.base.types import ToolRun
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


LONGEST_ERROR = 1_000
"""The most characters kept of a tool's error."""


def _ended(started: ToolRun, error: str | None = None, result: str | None = None) -> ToolRun:
    """The run that began as `started` and ends now."""
    return started.model_copy(update={"ended_at": clock.end_of(started.started_at), "error": error, "result": result})


class ToolWatch:
    """Times the tools that run for a model's tool call. Thread-safe. Tools that the app calls by itself have no tool call id
    and are not recorded."""

    def __init__(self) -> None:
        self._running: dict[UUID, ToolRun] = {}
        self._ended: list[ToolRun] = []

    def start(self, run: UUID, name: object, tool_call_id: object) -> None:
        """Note the start of a tool run."""
        if isinstance(tool_call_id, str) and tool_call_id:
            now = clock.now()
            self._running[run] = ToolRun(
                tool_call_id=tool_call_id, name=str(name or "tool"), started_at=now, ended_at=now
            )

    def end(self, run: UUID, output: object) -> None:
        """Note the result of a tool run. A tool message with status "error" counts as an error."""
        started = self._running.pop(run, None)
        if started is None:
            return
        text = result_text(output, started.tool_call_id)
        failed = any(message.status == "error" for message in _tool_messages(output))
        error = (text or "the tool reported an error")[:LONGEST_ERROR] if failed else None
        self._ended.append(_ended(started, error, text))

    def fail(self, run: UUID, error: BaseException) -> None:
        """Note that a tool raised. An interrupt or a hand-off to another agent is not an error."""
        started = self._running.pop(run, None)
        if started is not None:
            text = None if isinstance(error, GraphBubbleUp) else error_text(error, LONGEST_ERROR)
            self._ended.append(_ended(started, text))

    def write(self, trajectory: Trajectory, seen: Collection[str]) -> None:
        """Add the runs to a trajectory, in order of their start.

        `seen` has the tool call ids whose results are in a recorded call; their runs are stored without the result.
        """
        runs = [run.model_copy(update={"result": None}) if run.tool_call_id in seen else run for run in self._ended]
        unfinished = [_ended(run, "it had not ended when the rollout did") for run in list(self._running.values())]
        trajectory.tool_runs = sorted([*trajectory.tool_runs, *runs, *unfinished], key=lambda run: run.started_at)


def tool_call_ids(conversations: Iterable[Iterable[BaseMessage]]) -> frozenset[str]:
    """The tool call ids of the tool results in these messages."""
    return frozenset(
        message.tool_call_id for messages in conversations for message in messages if isinstance(message, ToolMessage)
    )


def result_text(output: object, tool_call_id: str) -> str | None:
    """A tool's result as text; None for a hand-off without a message."""
    messages = _tool_messages(output)
    own = next(
        (message for message in messages if message.tool_call_id == tool_call_id), messages[0] if messages else None
    )
    if own is not None:
        return str(own.text)
    return None if output is None or isinstance(output, Command) else str(output)


def _tool_messages(output: object) -> list[ToolMessage]:
    """The tool messages of a tool's output: a message itself, those of a Command's state update, or those of a list."""
    if isinstance(output, ToolMessage):
        return [output]
    if isinstance(output, list):
        return [message for item in cast(list[object], output) for message in _tool_messages(item)]
    update: Any = cast(Any, output).update if isinstance(output, Command) else None
    messages: object = cast(dict[str, object], update).get("messages") if isinstance(update, dict) else None
    return _tool_messages(cast(list[object], messages)) if isinstance(messages, list) else []


AGENT_NAME = "lc_agent_name"
"""LangChain's metadata key for the name of an agent built by `create_agent`. Runs inside the agent inherit it."""
NODE_TAG = "graph:step:"
"""Prefix of the tag that LangGraph adds to the run of a node. The node's parent is the run of its graph."""
UNNAMED = "LangGraph"
"""Name of a graph that was compiled without a name."""


@dataclass(frozen=True)
class ChainRun:
    """A chain's run. `agent` is LangChain's agent name, the run's own or inherited. `site`: where it was started."""

    name: str | None
    agent: str | None
    is_node: bool
    site: CallSite


class RunTree(BaseCallbackHandler):
    """Callback handler that keeps the parents of runs, the chains and the tool runs."""

    run_inline = True  # handlers run in the order of events, not in threads

    def __init__(self) -> None:
        self._parents: dict[UUID, UUID | None] = {}
        self._chains: dict[UUID, ChainRun] = {}
        self.tools = ToolWatch()

    def agent_of(self, run: UUID | None) -> str | None:
        """The name of the nearest named agent or graph that contains this run; None if there is none."""
        while run is not None:
            chain, parent = self._chains.get(run), self._parents.get(run)
            if chain is not None and chain.is_node and parent is not None:
                name = self._name_of_graph(parent)
                if name is not None:
                    return name
            run = parent
        return None

    def site_of(self, run: UUID | None) -> CallSite:
        """Where the app makes a call that is being made inside this run."""
        site = call_site()
        while run is not None and (site.line is None or site.judge is None):
            chain, run = self._chains.get(run), self._parents.get(run)
            if chain is not None:
                site = site.within(chain.site)
        return site

    def _name_of_graph(self, run: UUID) -> str | None:
        graph = self._chains.get(run)
        if graph is None:
            return None
        above = self._parents.get(run)
        while above is not None and above not in self._chains:  # a tool's run
            above = self._parents.get(above)
        inherited = self._chains[above].agent if above is not None else None
        if graph.agent is not None and graph.agent != inherited:
            return graph.agent  # the run's own name may be a `run_name` that the caller chose
        return None if graph.name == UNNAMED else graph.name

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._parents[run_id] = parent_of(kwargs)
        facts: Mapping[str, Any] = kwargs.get("metadata") or {}
        agent, tags = facts.get(AGENT_NAME), kwargs.get("tags") or ()
        is_node = any(str(tag).startswith(NODE_TAG) for tag in tags)
        self._chains[run_id] = ChainRun(kwargs.get("name"), None if agent is None else str(agent), is_node, call_site())

    def on_tool_start(self, serialized: Any, input_str: str, *, run_id: UUID, **kwargs: Any) -> None:
        self._parents[run_id] = parent_of(kwargs)
        name = kwargs.get("name") or cast(Mapping[str, Any], serialized or {}).get("name")
        self.tools.start(run_id, name, kwargs.get("tool_call_id"))

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self.tools.end(run_id, output)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self.tools.fail(run_id, error)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._parents[run_id] = parent_of(kwargs)


def parent_of(event: Mapping[str, Any]) -> UUID | None:
    """The parent of the run in a LangChain event."""
    return event.get("parent_run_id") or enclosing_run()


def enclosing_run(callbacks: object = None) -> UUID | None:
    """The run that contains a call with these callbacks. With `callbacks: []` it is the run of the context."""
    own = callbacks.parent_run_id if isinstance(callbacks, BaseCallbackManager) else None
    inherited = (var_child_runnable_config.get() or {}).get("callbacks")
    return own or (inherited.parent_run_id if isinstance(inherited, BaseCallbackManager) else None)
