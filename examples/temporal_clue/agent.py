"""Solves who was alone with the victim, in two forms: from the clues in one answer, or by looking things up."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI
from temporal_clue.puzzles import GUESTS, HOURS, ROOMS, VICTIM, Puzzle, make_puzzle


async def solve(client: AsyncOpenAI, model: str, scenario: dict[str, Any]) -> float:
    """One answer from the clues alone: the share of guest, room and hour that is right."""
    puzzle = make_puzzle(scenario["puzzle"])
    clues = "\n".join(puzzle.clues)
    answer = await client.chat.completions.create(
        model=model,
        messages=[
            {
                "role": "user",
                "content": f"Guests: {', '.join(GUESTS)}. Rooms: {', '.join(ROOMS)}. Hours: {', '.join(HOURS)}. Everybody was in "
                f"one room at each hour. At exactly one hour, exactly one guest was alone with {VICTIM}.\n{clues}\nWho was it, "
                "where and when? End with one line: guest, room, hour.",
            }
        ],
    )
    last = (answer.choices[0].message.content or "").strip().rsplit("\n", 1)[-1].lower()
    said = set(re.findall(r"[a-z]+", last))
    names = (puzzle.guest, puzzle.room, puzzle.hour)
    kinds = (GUESTS, ROOMS, HOURS)
    return (
        sum(said & {each.lower() for each in kind} == {name.lower()} for name, kind in zip(names, kinds, strict=True))
        / 3
    )


# ---- by looking things up

TOOLS = {
    "hour_room": ("The room of the victim at an hour.", "hour"),
    "room_guest": ("The guest who was in a room.", "room"),
    "room_lamp": ("The lamp of a room.", "room"),
    "hour_bell": ("What the bell does at an hour.", "hour"),
}
"""Name -> (description, its one argument). The first two lead to the answer."""
_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, (description, argument) in TOOLS.items()
]


def _look(puzzle: Puzzle) -> dict[str, Callable[[str], str]]:
    def room_guest(room: str) -> str:
        return next(iter(puzzle.companions(room, puzzle.hour)), "nobody")

    def hour_room(hour: str) -> str:
        return puzzle.place(VICTIM, hour) if hour in HOURS else "unknown"

    return {
        "hour_room": hour_room,
        "room_guest": room_guest,
        "room_lamp": lambda _: "on",
        "hour_bell": lambda _: "rings",
    }


async def look_up(client: AsyncOpenAI, model: str, scenario: dict[str, Any]) -> float:
    """The hour is told. Where the victim was then, and who else was there, are two requests, and for each the model has
    to find the tool. 1 if it names the guest in the end."""
    puzzle = make_puzzle(scenario["puzzle"])
    room = await _request(client, model, puzzle, f"where was he at {puzzle.hour}?")
    guest = await _request(client, model, puzzle, f"who else was in the {room}?")
    return float(puzzle.guest in guest)


async def _request(client: AsyncOpenAI, model: str, puzzle: Puzzle, request: str) -> str:
    """Ask, run the tools it calls, and return the last word of its answer."""
    look = _look(puzzle)
    messages: list[Any] = [{"role": "user", "content": request}]
    for _ in range(2):
        answer = await client.chat.completions.create(
            model=model, messages=messages, tools=_TOOLS, max_completion_tokens=64
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        calls = [call for call in message.tool_calls or () if call.type == "function"]
        for call in calls:
            value = next(iter(_arguments(call.function.arguments).values()), "")
            result = look[call.function.name](str(value)) if call.function.name in look else "no such tool"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not calls:
            break
    words = re.findall(r"\w+", messages[-1].get("content") or "")
    return words[-1] if words else ""


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
