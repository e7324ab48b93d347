"""Exports a rollout or a group as one HTML file, with styles and scripts inside, that needs no network.

Its content security policy allows only these styles and scripts, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query, Response
from markupsafe import Markup

import offbook
from offbook.server.views.group_view import GroupView
from offbook.server.views.rollout_view import RolloutView
from offbook.server.views.token_view import Colour

from .group_page import crumbs_of_group, group_context, known_group, title_of
from .rendering import HEADERS, STATIC, Crumb, SourceDep, environment
from .rollout_page import crumbs_of, known_rollout, rollout_context

router = APIRouter()

DOCUMENT_HEADERS = HEADERS | {"content-security-policy": "default-src 'none'; sandbox"}
"""If a browser displays the download instead of saving it, nothing in it runs with the server's origin."""


def rollout_document(view: RolloutView) -> str:
    """The HTML file of a rollout, with its token view."""
    return _document("rollout.html", view.name, crumbs_of(view), rollout_context(view), ("tokens.js",))


def group_document(view: GroupView) -> str:
    """The HTML file of a group, with its token tree and its rollouts side by side."""
    return _document("group.html", title_of(view), crumbs_of_group(view), group_context(view), ())


@router.get("/trajectories/{trajectory_id}/export")
async def export_rollout(
    trajectory_id: str, source: SourceDep, colour: Annotated[Colour | None, Query()] = None
) -> Response:
    """Download a rollout. `colour` selects the colouring of its tokens."""
    view = await known_rollout(source, trajectory_id, colour)
    return _download(rollout_document(view), f"rollout-{view.id}")


@router.get("/runs/{run}/steps/{step}/groups/{group}/export")
async def export_group(run: str, step: str, group: str, source: SourceDep) -> Response:
    """Download a group. `step` is only part of the address."""
    del step
    view = await known_group(source, run, group)
    return _download(group_document(view), f"group-{view.group}")


def _download(text: str, name: str) -> Response:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100]
    headers = DOCUMENT_HEADERS | {"content-disposition": f'attachment; filename="{plain}.html"'}
    return Response(text, media_type="text/html; charset=utf-8", headers=headers)


def _document(
    template: str, title: str, crumbs: tuple[Crumb, ...], context: Mapping[str, object], scripts: tuple[str, ...]
) -> str:
    style = "".join(_static_text(name) for name in ("app.css", "rollout.css"))
    script = "".join(_static_text(name) for name in scripts)
    shown = {
        **context,
        "standalone": True,
        "title": title,
        "crumbs": crumbs,
        "version": offbook.__version__,
        "style": Markup(style),  # safe: files of this package
        "script": Markup(script),
        "policy": _policy(style, script),
    }
    return environment().get_template(template).render(shown)


def _policy(style: str, script: str) -> str:
    """A content security policy that loads nothing and allows only this style and script."""
    scripts = f"script-src '{_hash(script)}'; " if script else ""
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; {scripts}base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _static_text(name: str) -> str:
    return (STATIC / name).read_text("utf-8")
