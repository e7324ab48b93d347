"""Detects compared scenarios that a model was trained on, by their text and by the server's records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from offbook.base.errors import ConfigError
from offbook.base.wire import TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.scenarios.identity import scenario_fields, scenario_id, scenario_text
from offbook_compare.likeness import NEARLY_EQUAL, jaccard, plain_words, shingles

from .journal import content_hash

PAGE = 1000


@dataclass(frozen=True)
class Overlap:
    """A compared scenario, the most similar training scenario, and their similarity: 1 for the same text."""

    scenario: str
    trained: str
    likeness: float


def overlaps(scenarios: Sequence[object], trained_on: Sequence[object]) -> list[Overlap]:
    """The scenarios with the content, the text or nearly the text of a training scenario."""
    contents = {_content(training_scenario): scenario_id(training_scenario) for training_scenario in trained_on}
    texts = {
        plain_words(text_of(training_scenario)): scenario_id(training_scenario) for training_scenario in trained_on
    }
    shingled = [
        (scenario_id(training_scenario), shingles(text_of(training_scenario))) for training_scenario in trained_on
    ]
    matches: list[Overlap] = []
    for scenario in scenarios:
        name, text = scenario_id(scenario), text_of(scenario)
        same = contents.get(_content(scenario)) or texts.get(plain_words(text))
        if same is not None:
            matches.append(Overlap(name, same, 1.0))
            continue
        own = shingles(text)
        likeness, nearest = max(((jaccard(own, other), other_name) for other_name, other in shingled), default=(0, ""))
        if likeness >= NEARLY_EQUAL:
            matches.append(Overlap(name, nearest, likeness))
    return matches


async def trained_ids(api: Api, models: Sequence[str]) -> set[str]:
    """The ids of all scenarios that these models were trained on, from the server's records. Raises ServerError."""
    ids: set[str] = set()
    for model in models:
        after = None
        while True:
            page = await api.trajectories(TrajectoryQuery(model=model, split="train", limit=PAGE, after=after))
            ids |= {record.place.scenario for record in page.trajectories if record.place.scenario is not None}
            if page.next is None:
                break
            after = page.next
    return ids


def contamination_warnings(
    scenarios: Sequence[object], trained_on: Iterable[object] | None, recorded: set[str]
) -> list[str]:
    """Warnings about compared scenarios that were trained on. `recorded` has the ids from the server's records."""
    warnings: list[str] = []
    alike = overlaps(scenarios, list(trained_on or ()))
    if alike:
        shown = ", ".join(f"{item.scenario} ({item.likeness:.0%} of {item.trained})" for item in alike[:5])
        warnings.append(
            f"{len(alike)} of {len(scenarios)} scenarios are like training scenarios: {shown}. Results on them say what was "
            "remembered; leave them out"
        )
    ids = [name for item in scenarios if (name := scenario_id(item)) in recorded]
    if ids:
        warnings.append(
            f"{len(ids)} of {len(scenarios)} scenarios have ids that the model was trained on, by the server's records: "
            f"{', '.join(ids[:5])}. Compare on held-out scenarios, or give them ids of their own"
        )
    return warnings


def _content(scenario: object) -> str:
    """Hash of a scenario's fields without the id."""
    fields: Mapping[str, object] = {} if isinstance(scenario, str) else scenario_fields(scenario)
    rest = {name: value for name, value in fields.items() if name != "id"}
    return content_hash(rest if rest else scenario)


def text_of(scenario: object) -> str:
    """The scenario's question; all its values but the id if it has no such field."""
    try:
        return scenario_text(scenario)
    except ConfigError:  # an app that builds its input from other fields
        return " ".join(str(value) for name, value in scenario_fields(scenario).items() if name != "id")
