"""Tells visitors of a museum about its paintings. It knows nothing of Offbook."""

from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph

PAINTERS, ROOMS, YEARS = ("Adler", "Blum", "Cray", "Dorn", "Ekman"), ("north", "garden", "tower"), range(1700, 1900)
PAINTINGS = {
    str(300 + 17 * number): {
        "painter": PAINTERS[number % len(PAINTERS)],
        "room": ROOMS[number % len(ROOMS)],
        "year": str(YEARS[number * 37 % len(YEARS)]),
    }
    for number in range(40)
}


def _field(painting: str, field: str) -> str:
    return PAINTINGS[painting][field] if painting in PAINTINGS else "no such painting"


def painter_name(painting: str) -> str:
    """Who painted it."""
    return _field(painting, "painter")


def room_name(painting: str) -> str:
    """Where it hangs."""
    return _field(painting, "room")


def paint_year(painting: str) -> str:
    """When it was painted."""
    return _field(painting, "year")


def make_agent() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The agent on the model that its firm pays for: OPENAI_API_KEY, and OPENAI_BASE_URL for another endpoint."""
    return create_agent(
        ChatOpenAI(model="gpt-4.1-mini", max_completion_tokens=48), [painter_name, room_name, paint_year]
    )
