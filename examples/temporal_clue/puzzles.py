"""Puzzles of who was where and when, each with one solution that the solver proves unique.

Three guests and the victim spend three hours in three rooms. At exactly one hour, one guest is alone with the victim.
A puzzle is a list of clues that leaves one answer (guest, room, hour), and loses it without any one of them.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

GUESTS = ("Green", "Plum", "Scarlet")
ROOMS = ("library", "kitchen", "study")
HOURS = ("eight", "nine", "ten")
VICTIM = "Boddy"
PEOPLE = (*GUESTS, VICTIM)
ANSWERS = len(GUESTS), len(HOURS), len(ROOMS)


@dataclass(frozen=True)
class Puzzle:
    """`places[person][hour]`: the room, in the order of PEOPLE and HOURS."""

    clues: tuple[str, ...]
    places: tuple[tuple[str, ...], ...]
    guest: str
    room: str
    hour: str

    def place(self, person: str, hour: str) -> str:
        return self.places[PEOPLE.index(person)][HOURS.index(hour)]

    def companions(self, room: str, hour: str) -> list[str]:
        return [guest for guest in GUESTS if self.place(guest, hour) == room]


@cache
def make_puzzle(seed: int) -> Puzzle:
    """A puzzle of this seed, made once for all rollouts of it: making one takes a tenth of a second."""
    numbers = random.Random(seed)
    worlds, answers = _worlds()
    world = numbers.choice(np.flatnonzero(answers >= 0).tolist())
    clues = _clues(world)
    numbers.shuffle(clues)
    chosen: list[tuple[str, NDArray[np.bool_]]] = []
    left = answers >= 0
    for text, holds in clues:
        if (left & ~holds).any():
            chosen.append((text, holds))
            left &= holds
        if _is_solved(answers[left]):
            break
    for clue in list(chosen):  # a clue that the others imply is not needed
        others = [holds for text, holds in chosen if text != clue[0]]
        if _is_solved(answers[np.logical_and.reduce([answers >= 0, *others])]):
            chosen.remove(clue)
    places = tuple(tuple(ROOMS[room] for room in person) for person in worlds[world])
    return Puzzle(tuple(text for text, _ in chosen), places, *_names(int(answers[world])))


def solutions(clues: tuple[str, ...]) -> set[tuple[str, str, str]]:
    """Every (guest, room, hour) that these clues leave open."""
    answers = _worlds()[1]
    left = np.logical_and.reduce([answers >= 0, *(_all_clues()[clue] for clue in clues)])
    return {_names(value) for value in np.unique(answers[left]).tolist()}


def _names(answer: int) -> tuple[str, str, str]:
    guest, hour, room = (int(number) for number in np.unravel_index(answer, ANSWERS))
    return GUESTS[guest], ROOMS[room], HOURS[hour]


def _is_solved(answers: NDArray[np.int64]) -> bool:
    return len(answers) > 0 and bool((answers == answers[0]).all())


@cache
def _worlds() -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """All worlds [W, person, hour] as numbers of rooms, and each one's answer, its place in ANSWERS; -1 without exactly
    one."""
    size = len(PEOPLE) * len(HOURS)
    rooms = np.array(list(itertools.product(range(len(ROOMS)), repeat=size)), np.int8)
    worlds = rooms.reshape(-1, len(PEOPLE), len(HOURS))
    with_victim = worlds[:, :-1] == worlds[:, -1:]
    alone = with_victim & (with_victim.sum(1, keepdims=True) == 1)
    flat = alone.reshape(len(worlds), -1)
    guest, hour = np.divmod(flat.argmax(1), len(HOURS))
    room = worlds[np.arange(len(worlds)), -1, hour]
    return worlds, np.where(flat.sum(1) == 1, np.ravel_multi_index((guest, hour, room), ANSWERS), -1)


@cache
def _all_clues() -> dict[str, NDArray[np.bool_]]:
    """Every clue there is, and the worlds in which it holds."""
    worlds, _ = _worlds()
    clues: dict[str, NDArray[np.bool_]] = {}
    for (p, person), (h, hour), (r, room) in itertools.product(*map(enumerate, (PEOPLE, HOURS, ROOMS))):
        clues[f"At {hour}, {person} was in the {room}."] = worlds[:, p, h] == r
        clues[f"At {hour}, {person} was not in the {room}."] = worlds[:, p, h] != r
    for (h, hour), (r, room) in itertools.product(enumerate(HOURS), enumerate(ROOMS)):
        clues[f"At {hour}, nobody was in the {room}."] = (worlds[:, :, h] != r).all(1)
    for ((a, first), (b, second)), (h, hour) in itertools.product(
        itertools.combinations(enumerate(PEOPLE), 2), enumerate(HOURS)
    ):
        clues[f"At {hour}, {first} and {second} were together."] = worlds[:, a, h] == worlds[:, b, h]
    return clues


def _clues(world: int) -> list[tuple[str, NDArray[np.bool_]]]:
    """The clues that hold in this world."""
    return [(text, holds) for text, holds in _all_clues().items() if holds[world]]
