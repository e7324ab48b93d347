"""The variables and configuration files by which a program's SDK or CLI finds the gateway."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from offbook.base.errors import ConfigError
from offbook.base.http_access import trajectory_key
from offbook.base.redaction import is_secret
from offbook.base.text import counted, one_line
from offbook.base.types import Call

REWARD_FILE = "OFFBOOK_REWARD_FILE"
SCENARIO = "OFFBOOK_SCENARIO"
SCENARIO_FILE = "OFFBOOK_SCENARIO_FILE"
LONGEST_VARIABLE = 100_000
"""Bytes of a variable's value; Linux refuses to start a program with one of 128 KiB."""
AROUND_THE_GATEWAY = frozenset({"ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK"}) | {
    "CLAUDE_CODE_USE_VERTEX",
    "AZURE_OPENAI_API_KEY",
    "GOOGLE_GENAI_USE_VERTEXAI",
    "GOOGLE_GENAI_USE_GCA",
    "OPENAI_ORG_ID",
    "OPENAI_PROJECT_ID",
}
"""Variables taken out of the program's environment: with them, a client would go past the gateway."""

_MAX_NAMED = 10
_CODEX = """\
model = {model}
model_provider = "offbook"
[model_providers.offbook]
name = "offbook"
base_url = {url}
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DO_NOT_TRACK": "1",
    "NO_UPDATE_NOTIFIER": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""Telemetry and updaters off: they are no part of a rollout."""


@dataclass(frozen=True)
class ProgramGateway:
    """Where a program's calls go: the server's URL, the trajectory that they belong to, the model, the server's key (None: it
    has none), and the temperature at which they are sampled (None: as the program asks)."""

    url: str
    trajectory: str
    model: str
    server_key: str | None = None
    temperature: float | None = None

    @property
    def key(self) -> str:
        """The key that the program gets: valid for its own calls only."""
        return "none" if self.server_key is None else trajectory_key(self.server_key, self.trajectory)

    @property
    def root(self) -> str:
        """The URL of the trajectory, below which the routes of every API stand. Its model answers whatever the program asks for:
        most programs name a model of their own."""
        suffix = "" if self.temperature is None else f"/at/{self.temperature}"
        return f"{self.url}/m/{quote(self.model, safe='/@')}/t/{self.trajectory}{suffix}"


def gateway_variables(gateway: ProgramGateway, files: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that send a program's calls to `gateway`. Configuration files are written below `files`.

    `inherited`: the environment to which they will be added; its `NO_PROXY` is extended."""
    root, key, model = gateway.root, gateway.key, gateway.model
    host = urlsplit(gateway.url).hostname or ""
    direct = ",".join(filter(None, [inherited.get("NO_PROXY") or inherited.get("no_proxy"), host, "localhost"]))
    return {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL"), f"{root}/v1"),
        **dict.fromkeys(
            ("OPENAI_API_KEY", "LLM_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY"), key
        ),
        **dict.fromkeys(
            ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_URL", "ANTHROPIC_API_BASE", "GOOGLE_GEMINI_BASE_URL"), root
        ),
        "GEMINI_API_BASE": f"{root}/v1beta",
        "LLM_MODEL": f"openai/{model}",
        **dict.fromkeys(("OPENAI_MODEL", "GEMINI_MODEL", "OFFBOOK_MODEL"), model),
        **dict.fromkeys(
            (
                "ANTHROPIC_MODEL",
                "ANTHROPIC_SMALL_FAST_MODEL",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL",
                "ANTHROPIC_DEFAULT_SONNET_MODEL",
                "ANTHROPIC_DEFAULT_OPUS_MODEL",
                "CLAUDE_CODE_SUBAGENT_MODEL",
            ),
            model,
        ),
        **_configuration(gateway, files),
        **_QUIET,
        **dict.fromkeys(("NO_PROXY", "no_proxy"), direct),
        "OFFBOOK_TRAJECTORY": gateway.trajectory,
    }


def _configuration(gateway: ProgramGateway, files: Path) -> dict[str, str]:
    """Write the files of the CLIs that read no base URL from a variable, and say by which variable each finds its own.
    Sign-ins and settings of the user's own are so left alone."""
    codex, claude, gemini = files / "codex", files / "claude", files / "gemini"
    for folder in (codex, claude, gemini / ".gemini"):
        folder.mkdir(parents=True)
    text = _CODEX.format(model=json.dumps(gateway.model), url=json.dumps(f"{gateway.root}/v1"))
    (codex / "config.toml").write_text(text, encoding="utf-8")
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": False}}
    (gemini / ".gemini" / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    return {"CODEX_HOME": str(codex), "CLAUDE_CONFIG_DIR": str(claude), "GEMINI_CLI_HOME": str(gemini)}


def program_environment(added: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program: `inherited`, without variables that look like secrets and without what would lead a
    client past the gateway, and `added`."""
    held = {*AROUND_THE_GATEWAY, *held_back(inherited)}
    return {name: value for name, value in inherited.items() if name not in held} | dict(added)


def held_back(inherited: Mapping[str, str]) -> list[str]:
    """The names of the variables that look like secrets, by their names or by their values."""
    return sorted(name for name, value in inherited.items() if is_secret(name, value))


def held_back_line(added: Mapping[str, str], inherited: Mapping[str, str], remedy: str) -> str | None:
    """Which variables a program does not get, and what to do: names, never values. None if it gets all."""
    names = [name for name in held_back(inherited) if name not in {*added, *AROUND_THE_GATEWAY}]
    shown = ", ".join(one_line(name) for name in names)
    return f"variables that look like secrets are not passed to the program: {shown}; {remedy}" if names else None


def models_line(calls: Sequence[Call], model: str) -> str | None:
    """What to say of a program that named several models, which were all one. None if it named one."""
    names = Counter(
        call.origin.model if call.origin is not None and call.origin.model else call.model for call in calls
    )
    if len(names) < 2:
        return None
    shown = ", ".join(f"{one_line(name)} ({counted(count, 'call')})" for name, count in names.most_common(_MAX_NAMED))
    return (
        f"the program named {len(names)} models, and {model} answered for all: {shown}. If one of them is a judge or a "
        "simulated user, give its client an address and a key of its own, so that the policy does not judge itself"
    )


def passed_variables(texts: Sequence[str], inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of `--env`, each a NAME or NAME=value. Raises ConfigError for one that is not set."""
    passed: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or (not equals and name not in inherited):
            raise ConfigError(
                f"--env: {one_line(name)!r} is not set here; name a variable that is, or write NAME=value"
            )
        passed[name] = value if equals else inherited[name]
    return passed


def scenario_variables(scenario: str, files: Path) -> dict[str, str]:
    """Write a scenario, as JSON, to a file that OFFBOOK_SCENARIO_FILE names. OFFBOOK_SCENARIO has the same text, unless
    it is too long for a variable."""
    path = files / "scenario.json"
    path.write_text(scenario, encoding="utf-8")
    whole = {SCENARIO: scenario} if len(scenario.encode()) <= LONGEST_VARIABLE else {}
    return {SCENARIO_FILE: str(path), **whole}


def write_env_file(files: Path, variables: Mapping[str, str]) -> Path:
    """Write the variables as lines `NAME=value`, as `docker run --env-file` reads them: without those of several lines."""
    path = files / "env"
    path.touch(mode=0o600)
    lines = [f"{name}={value}\n" for name, value in variables.items() if "\n" not in value]
    path.write_text("".join(lines), encoding="utf-8")
    return path
