"""What answers over HTTP: the server on a directory or at a URL, Langfuse, a judge. Only what is set up is asked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from ..client.commands import running_server
from .packages import Check

SECONDS = 5.0
LANGFUSE_CLOUD = "https://cloud.langfuse.com"
OPENAI = "https://api.openai.com/v1"
_SHOWN = ("loader", "device", "dtype", "attention")


class ServerFacts(BaseModel):
    """What `/health` tells; a server of another version may tell less or more."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    status: str
    version: str
    base_model: str
    engine: str
    pid: int
    detail: str | None = None
    in_flight: int = 0
    restarts: int = 0
    learner: dict[str, str] = {}


def server_checks(folder: Path, environment: Mapping[str, str] = os.environ) -> list[Check]:
    """The server on the directory, and the one at UNDERSTUDY_URL."""
    url = environment.get("UNDERSTUDY_URL")
    checks = _of_server("UNDERSTUDY_URL", url.rstrip("/")) if url else []
    running = running_server(folder)
    if running is not None:
        return checks + _of_server("on the directory", running.url)
    return [*checks, Check("server", "on the directory", "ok", f"none runs on {folder}")]


def _of_server(name: str, url: str) -> list[Check]:
    try:
        answer = httpx.get(f"{url}/health", timeout=SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [Check("server", name, "warn", f"{url} does not answer ({_why(error)})", "understudy serve")]
    try:
        facts = ServerFacts.model_validate_json(answer.content)
    except ValidationError:
        return [Check("server", name, "warn", f"{url} is no server of Understudy (HTTP {answer.status_code})")]
    head = f"{url}, pid {facts.pid}, version {facts.version}: base {facts.base_model}, engine {facts.engine}"
    detail = f" ({facts.detail})" if facts.detail else ""
    sampler = f"{facts.status}{detail}, {facts.in_flight} calls in flight, {facts.restarts} restarts"
    calm = facts.status != "failed" and facts.restarts == 0
    return [
        Check("server", name, "ok", head),
        Check("server", "sampler", "ok" if calm else "warn", sampler, None if calm else "see logs/sampler.log"),
        *_learner(facts.learner),
    ]


def _learner(facts: dict[str, str]) -> list[Check]:
    """Which loader, and what the mask probe said. Refused, training is exact and slower: rows in place of the tree."""
    if not facts:
        return []
    lines = [Check("server", "learner", "ok", ", ".join(f"{name} {facts[name]}" for name in _SHOWN if name in facts))]
    if (probe := facts.get("mask_probe")) is not None:
        lines.append(Check("server", "mask probe", "warn" if probe.startswith("refused") else "ok", probe))
    return lines


def langfuse_checks(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Whether Langfuse answers and takes the keys; nothing where it is not set up."""
    host = environment.get("LANGFUSE_BASE_URL") or environment.get("LANGFUSE_HOST")
    public, secret = environment.get("LANGFUSE_PUBLIC_KEY"), environment.get("LANGFUSE_SECRET_KEY")
    if not (host or public or secret):
        return []
    url = (host or LANGFUSE_CLOUD).rstrip("/")
    try:
        health = httpx.get(f"{url}/api/public/health", timeout=SECONDS)
        if not health.is_success:
            return [Check("services", "Langfuse", "warn", f"{url} answers HTTP {health.status_code}")]
        if not (public and secret):
            unset = " and ".join(n for n in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY") if not environment.get(n))
            return [Check("services", "Langfuse", "warn", f"{url} answers; no key", f"export {unset}=...")]
        status = httpx.get(f"{url}/api/public/projects", auth=(public, secret), timeout=SECONDS).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [Check("services", "Langfuse", "warn", f"{url} does not answer ({_why(error)})", "LANGFUSE_BASE_URL")]
    if status in (401, 403):
        fix = "LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY"
        return [Check("services", "Langfuse", "warn", f"{url} refuses the keys (HTTP {status})", fix)]
    return [Check("services", "Langfuse", "ok", f"{url} answers and takes the keys")]


def judge_checks(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Whether the judge's endpoint answers; nothing where neither UNDERSTUDY_JUDGE nor OPENAI_API_KEY is set."""
    key, given = environment.get("OPENAI_API_KEY"), environment.get("UNDERSTUDY_JUDGE")
    if not (key or given):
        return []
    url = (given or environment.get("OPENAI_BASE_URL") or OPENAI).rstrip("/")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        status = httpx.get(f"{url}/models", headers=headers, timeout=SECONDS).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [Check("services", "judge", "warn", f"{url} does not answer ({_why(error)})")]
    if status in (401, 403):
        return [Check("services", "judge", "warn", f"{url} refuses the key (HTTP {status})", "OPENAI_API_KEY")]
    if status >= 400:
        return [Check("services", "judge", "warn", f"{url}/models answers HTTP {status}")]
    return [Check("services", "judge", "ok", f"{url} answers")]


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
