"""A planner that hands each request to the worker who can answer it. It knows nothing of Offbook."""

from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command

SHELVES, SIZES, TERMS = (
    ("north", "south", "east", "west"),
    ("tiny", "flat", "tall", "huge"),
    ("today", "monday", "friday"),
)
ORDERS = {
    str(2_000 + 41 * number): {
        "place": SHELVES[number % 4],
        "size": SIZES[number // 2 % 4],
        "price": f"{17 + number * 7 % 83} euros",
        "term": TERMS[number % 3],
    }
    for number in range(60)
}


def _field(order: str, field: str) -> str:
    return ORDERS[order][field] if order in ORDERS else "no such order"


def shelf_place(order: str) -> str:
    """The shelf on which an order lies."""
    return _field(order, "place")


def box_size(order: str) -> str:
    """The size of an order's box."""
    return _field(order, "size")


def full_price(order: str) -> str:
    """What an order costs."""
    return _field(order, "price")


def pay_term(order: str) -> str:
    """The day by which an order is to be paid."""
    return _field(order, "term")


def ask_warehouse(order: str) -> None:
    """The warehouse knows where an order lies and how large it is."""


def ask_office(order: str) -> None:
    """The office knows what an order costs and by when it is to be paid."""


def _model() -> ChatOpenAI:
    return ChatOpenAI(model="gpt-4.1-mini", max_completion_tokens=48)


def make_agent() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The planner's call names the worker; the worker reads the request alone, and its answer is the answer."""
    planner = _model().bind_tools([ask_warehouse, ask_office])
    workers = {
        "warehouse": create_agent(_model(), [shelf_place, box_size], name="warehouse"),
        "office": create_agent(_model(), [full_price, pay_term], name="office"),
    }

    async def plan(state: MessagesState) -> Command[str]:
        reply = await planner.ainvoke(state["messages"])
        names = [call["name"].removeprefix("ask_") for call in getattr(reply, "tool_calls", ())]
        return Command(update={"messages": [reply]}, goto=names[0] if names and names[0] in workers else END)

    def node(name: str) -> Any:
        async def work(state: MessagesState) -> dict[str, list[BaseMessage]]:
            done = await workers[name].ainvoke({"messages": [*state["messages"][:1]]})
            return {"messages": done["messages"][1:]}

        return work

    graph = StateGraph(MessagesState)
    graph.add_node("planner", plan, destinations=(*workers, END))
    graph.add_edge(START, "planner")
    for name in workers:
        graph.add_node(name, node(name))
        graph.add_edge(name, END)
    return graph.compile(name="desk")
