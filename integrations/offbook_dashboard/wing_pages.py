"""The door of the dashboard: how another wing adds pages. It names a `WingPages` as an entry point of the group `offbook.pages`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from fastapi import APIRouter

from offbook import plugins

if TYPE_CHECKING:
    from .source import DashboardSource


@dataclass(frozen=True)
class PageLink:
    """A line on the first page that leads to a page of a wing: what kind of thing it is, its name and address, and a few words."""

    kind: str
    text: str
    url: str
    note: str = ""


class WingPages:
    """Pages of a wing: of a running server, and of `offbook ui`, which has the records alone."""

    router: ClassVar[APIRouter]
    """Its routes. A handler gets the records as `SourceDep`, and renders with `rendering.page`."""
    templates: ClassVar[Path]
    """The folder of its Jinja2 templates. Their names must not occur in the dashboard's."""

    @classmethod
    async def links(cls, source: DashboardSource) -> Sequence[PageLink]:
        """What the first page says about it."""
        del source
        return ()


@cache
def pages_of_wings() -> list[type[WingPages]]:
    """The pages of all installed wings. Raises ConfigError."""
    return [plugins.load_class("offbook.pages", name, WingPages) for name in plugins.names("offbook.pages")]
