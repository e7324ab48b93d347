"""Whether scenarios that a model is compared on were trained on: by their text, and by what the records say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.client.http import Api
from understudy.errors import ConfigError
from understudy.scenarios.identity import scenario_fields, scenario_id, scenario_text
from understudy.wire import TrajectoryQuery

from .rows import content_hash

SHINGLE = 3
"""Words in a row that are compared."""
NEARLY_EQUAL = 0.8
"""Share of common shingles from which two texts count as the same one."""
PAGE = 1000


@dataclass(frozen=True)
class Overlap:
    """A scenario that is compared on, the training scenario that it is like, and how like: 1 is the same text."""

    scenario: str
    trained: str
    likeness: float


def overlaps(scenarios: Sequence[object], trained_on: Sequence[object]) -> list[Overlap]:
    """The scenarios whose content, text, or nearly all of its words in their order were trained on."""
    contents = {_content(each): scenario_id(each) for each in trained_on}
    texts = {_plain(text_of(each)): scenario_id(each) for each in trained_on}
    shingled = [(scenario_id(each), _shingles(text_of(each))) for each in trained_on]
    found: list[Overlap] = []
    for scenario in scenarios:
        name, text = scenario_id(scenario), text_of(scenario)
        same = contents.get(_content(scenario)) or texts.get(_plain(text))
        if same is not None:
            found.append(Overlap(name, same, 1.0))
            continue
        own = _shingles(text)
        likeness, nearest = max(((_jaccard(own, other), other_name) for other_name, other in shingled), default=(0, ""))
        if likeness >= NEARLY_EQUAL:
            found.append(Overlap(name, nearest, likeness))
    return found


async def trained_ids(api: Api, models: Sequence[str]) -> set[str]:
    """The ids of all scenarios that these models were trained on, by the server's records."""
    found: set[str] = set()
    for model in models:
        after = None
        while True:
            page = await api.trajectories(TrajectoryQuery(model=model, split="train", limit=PAGE, after=after))
            found |= {each.place.scenario for each in page.trajectories if each.place.scenario is not None}
            if page.next is None:
                break
            after = page.next
    return found


def contamination_warnings(
    scenarios: Sequence[object], trained_on: Sequence[object] | None, recorded: set[str]
) -> list[str]:
    """What a reader must know of scenarios that were trained on; empty where nothing was found."""
    found: list[str] = []
    alike = overlaps(scenarios, trained_on or [])
    if alike:
        shown = ", ".join(f"{each.scenario} ({each.likeness:.0%} of {each.trained})" for each in alike[:5])
        found.append(
            f"{len(alike)} of {len(scenarios)} scenarios are like training scenarios: {shown}. Results on them say what was "
            "remembered; leave them out"
        )
    ids = [name for each in scenarios if (name := scenario_id(each)) in recorded]
    if ids:
        found.append(
            f"{len(ids)} of {len(scenarios)} scenarios have ids that the model was trained on, by the server's records: "
            f"{', '.join(ids[:5])}. Compare on held-out scenarios, or give them ids of their own"
        )
    return found


def _content(scenario: object) -> str:
    """Of all but the id."""
    fields: Mapping[str, object] = {} if isinstance(scenario, str) else scenario_fields(scenario)
    rest = {name: value for name, value in fields.items() if name != "id"}
    return content_hash(rest if rest else scenario)


def text_of(scenario: object) -> str:
    """What is asked in it; of a scenario without such a field, all its values but the id."""
    try:
        return scenario_text(scenario)
    except ConfigError:  # an app that makes its input of other fields
        return " ".join(str(value) for name, value in scenario_fields(scenario).items() if name != "id")


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _shingles(text: str) -> frozenset[str]:
    words = _plain(text).split()
    return frozenset(" ".join(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1)))


def _jaccard(own: frozenset[str], other: frozenset[str]) -> float:
    together = len(own | other)
    return len(own & other) / together if together else 0.0
