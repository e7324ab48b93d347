"""Detects compared scenarios that a model was trained on, by their text and by the server's records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from offbook.base.errors import ConfigError
from offbook.base.wire import TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.scenarios.identity import scenario_fields, scenario_id, scenario_text

from .journal import content_hash

PAGE = 1000


def overlaps(scenarios: Sequence[object], trained_on: Sequence[object]) -> dict[str, str]:
    """The scenarios with the content or the words of a training scenario -> that one."""
    trained: dict[str, str] = {}
    for scenario in trained_on:
        trained |= dict.fromkeys((_content(scenario), plain_words(text_of(scenario))), scenario_id(scenario))
    matches: dict[str, str] = {}
    for scenario in scenarios:
        same = trained.get(_content(scenario)) or trained.get(plain_words(text_of(scenario)))
        if same is not None:
            matches[scenario_id(scenario)] = same
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
        shown = ", ".join(f"{name} ({trained})" for name, trained in list(alike.items())[:5])
        warnings.append(
            f"{len(alike)} of {len(scenarios)} scenarios are training scenarios: {shown}. Results on them say what was "
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


def plain_words(text: str) -> str:
    """The words of a text in lower case, joined by one space."""
    return " ".join(re.findall(r"\w+", text.lower()))
