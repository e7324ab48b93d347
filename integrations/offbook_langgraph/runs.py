"""LangChain's run tree during a capture: the parent of every run, and the agent that a call belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.runnables.config import var_child_runnable_config

from .tool_watch import ToolWatch

AGENT_NAME = "lc_agent_name"
"""LangChain's metadata key for the name of an agent built by `create_agent`. Runs inside the agent inherit it."""
NODE_TAG = "graph:step:"
"""Prefix of the tag that LangGraph adds to the run of a node. The node's parent is the run of its graph."""
UNNAMED = "LangGraph"
"""Name of a graph that was compiled without a name."""


@dataclass(frozen=True)
class ChainRun:
    """A chain's run. `agent` is LangChain's agent name, the run's own or inherited."""

    name: str | None
    agent: str | None
    is_node: bool


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
        self._chains[run_id] = ChainRun(kwargs.get("name"), None if agent is None else str(agent), is_node)

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
