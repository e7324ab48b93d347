"""What each step goes on from: the step before it, or the step of another model that it is a copy of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.base.wire import name_at
from offbook.engine import checkpoint_files
from offbook.server.models.checkpoints import scan_models

from .audit import TrainedStep

Place = tuple[str, int]
"""A model and a step of it."""


@dataclass(frozen=True)
class Lineage:
    """`trained`: the train request of each step. `origins`: for each copy, the step that it is a copy of."""

    trained: Mapping[Place, TrainedStep]
    origins: Mapping[Place, Place]

    def before(self, place: Place) -> Iterator[Place]:
        """The steps that a step goes on from, newest first.

        >>> copied = Lineage({}, {("fork", 1): ("agent", 1)})
        >>> list(copied.before(("fork", 2)))
        [('fork', 1), ('agent', 1)]
        """
        seen = {place}
        while True:
            model, step = place
            place = self.origins.get(place, (model, step - 1))
            if place[1] < 1 or place in seen:
                return
            seen.add(place)
            yield place

    def unrecorded(self, places: Iterable[Place]) -> list[Place]:
        """Those that are no copies, and whose train requests are not in the records."""
        return [place for place in places if place not in self.trained and place not in self.origins]

    def seen_since(self, places: Iterable[Place]) -> dict[str, int]:
        """By model, the first step that is one of these or goes on from one.

        >>> Lineage({}, {("fork", 3): ("agent", 3)}).seen_since([("agent", 2)])
        {'agent': 2, 'fork': 3}
        """
        first: dict[str, int] = {}
        waiting = list(places)
        while waiting:
            model, step = waiting.pop()
            if step < first.get(model, step + 1):
                first[model] = step
                waiting += [copy for copy, (name, number) in self.origins.items() if name == model and number >= step]
        return dict(sorted(first.items()))


def read_lineage(root: Path, trained: Sequence[TrainedStep]) -> Lineage:
    """The lineage of the models in a server's directory. Blocks. Raises StoreError if a file cannot be read."""
    origins: dict[Place, Place] = {}
    for folder, facts in scan_models(root):
        checkpoints = folder / "checkpoints"
        for step in checkpoint_files.steps(checkpoints):
            path = checkpoint_files.path_of(checkpoints, step)
            try:
                origin = checkpoint_files.read_note(path).forked_from
            except FileNotFoundError:
                continue  # deleted meanwhile
            except ValueError:
                continue  # damaged: the server puts it aside
            except OSError as error:
                raise checkpoint_files.not_checked(path, error) from error
            if origin is not None:
                origins[facts.name, step] = origin.model, origin.step
    return Lineage({(one.model, one.step): one for one in trained}, origins)


def names(places: Iterable[Place]) -> tuple[str, ...]:
    """The places as `agent@3`."""
    return tuple(name_at(model, step) for model, step in places)
