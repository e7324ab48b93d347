"""`GET /`: what this server serves, as one small page without scripts."""

from __future__ import annotations

from html import escape

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

import understudy

from ..models.checkpoints import state_of
from ..models.model import ServedModel
from ..services import ServicesDep
from ..training.learner_client import LearnerClient

router = APIRouter()

_SHOWN = 12
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Understudy</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse}}td,th{{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}}
code{{font-size:.9em}}</style>
<h1>Understudy</h1>
<p>Version {version}, base model <code>{base}</code>, training: {running}.</p>
<p>Sampler: {engine}, {sampler}. Learner: {learner}.</p>
<table><tr><th>model</th><th>project</th><th>step</th><th>metrics of its newest step</th></tr>
{rows}</table>
</html>
"""


@router.get("/")
async def status_page(services: ServicesDep) -> HTMLResponse:
    page = _PAGE.format(
        version=escape(understudy.__version__),
        base=escape(services.base.name),
        engine=escape(services.engine.described()),
        sampler=escape(services.sampler.state),
        learner=escape(_learner(services.learner)),
        running=escape(services.training.running or "nothing"),
        rows="\n".join(_row(model) for model in services.models.registry.models()),
    )
    return HTMLResponse(page, headers=_HEADERS)


def _learner(learner: LearnerClient | None) -> str:
    if learner is None:
        return "off (--inference-only)"
    return "; ".join([learner.state, *(f"{name} {value}" for name, value in learner.facts.items())])


def _row(model: ServedModel) -> str:
    newest = model.checkpoints.get(model.step)
    metrics = state_of(newest).metrics if newest is not None else {}
    shown = ", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items())[:_SHOWN]) or "none yet"
    cells = (model.facts.name, model.facts.project, str(model.step), shown)
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
