"""Services that answer over HTTP: the server, Langfuse and the judge. Only those that are configured are queried."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from ..client.commands import running_server
from .packages import Check

SECONDS = 5.0
"""Time limit of a request in seconds."""
LANGFUSE_CLOUD = "https://cloud.langfuse.com"
OPENAI = "https://api.openai.com/v1"
_SHOWN = ("loader", "device", "dtype", "kernels", "attention")


class ServerFacts(BaseModel):
    """The answer of `/health`. A server of another version may have fewer or more fields."""

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
        return [Check("server", name, "warn", f"{url} is not a server of Understudy (HTTP {answer.status_code})")]
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
    """The loader of the learner, the result of its mask probe, and how far its logprobs are from the sampler's. If the
    probe refused the tree, training is exact but slower."""
    if not facts:
        return []
    lines = [Check("server", "learner", "ok", ", ".join(f"{name} {facts[name]}" for name in _SHOWN if name in facts))]
    if (probe := facts.get("mask_probe")) is not None:
        lines.append(Check("server", "mask probe", "warn" if probe.startswith("refused") else "ok", probe))
    if (logprobs := facts.get("logprobs")) is not None:
        lines.append(Check("server", "logprobs", "ok" if logprobs.startswith("ok") else "warn", logprobs))
    return lines


def langfuse_checks(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Whether Langfuse answers and accepts the keys. Empty if it is not configured."""
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
            return [
                Check("services", "Langfuse", "warn", f"{url} answers, but {unset} is not set", f"export {unset}=...")
            ]
        status = httpx.get(f"{url}/api/public/projects", auth=(public, secret), timeout=SECONDS).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [Check("services", "Langfuse", "warn", f"{url} does not answer ({_why(error)})", "LANGFUSE_BASE_URL")]
    if status in (401, 403):
        fix = "LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY"
        return [Check("services", "Langfuse", "warn", f"{url} rejects the keys (HTTP {status})", fix)]
    return [Check("services", "Langfuse", "ok", f"{url} answers and accepts the keys")]


def judge_checks(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Whether the judge's endpoint answers. Empty if neither UNDERSTUDY_JUDGE nor OPENAI_API_KEY is set."""
    key, judge = environment.get("OPENAI_API_KEY"), environment.get("UNDERSTUDY_JUDGE")
    if not (key or judge):
        return []
    url = (judge or environment.get("OPENAI_BASE_URL") or OPENAI).rstrip("/")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        status = httpx.get(f"{url}/models", headers=headers, timeout=SECONDS).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return [Check("services", "judge", "warn", f"{url} does not answer ({_why(error)})")]
    if status in (401, 403):
        return [Check("services", "judge", "warn", f"{url} rejects the key (HTTP {status})", "OPENAI_API_KEY")]
    if status >= 400:
        return [Check("services", "judge", "warn", f"{url}/models answers HTTP {status}")]
    return [Check("services", "judge", "ok", f"{url} answers")]


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
