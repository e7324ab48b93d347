"""Options of a command from the fields of a class."""

# ruff: noqa: RUF009  # option() makes a field

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from offbook.commands.generated_options import with_options


@dataclass(frozen=True)
class Meaning:
    help: str
    least: float | None = None
    most: float | None = None
    default: str = ""


def option(default: Any, *meaning: Any) -> Any:
    return field(default=default, metadata={"meaning": Meaning(*meaning)})


@dataclass(frozen=True)
class Run:
    target: str
    group_size: int = option(8, "rollouts per scenario", 2)
    timeout: float = option(300.0, "seconds per rollout")
    concurrency: int = option(32, "rollouts at the same time", 1, None, "32, or the app's limit")
    max_cost: float | None = option(None, "USD to spend")
    output: Path = option(Path("out"), "folder to write to")
    overlap: bool = option(False, "overlap rollouts and updates")
    reward: Callable[..., float] | None = option(None, "a function")
    seed: int = 0


class Server(BaseModel):
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on")
    engine: Literal["auto", "vllm"] = Field(default="auto", description="the engine")
    urls: tuple[str, ...] = Field(default=(), description="URLs, comma-separated")
    shares: tuple[float, ...] = Field(default=(0.0, 0.25, 1.0), description="shares of calls")
    divisor: float | Literal["tokens"] = Field(default="tokens", description="what divides the loss")


taken: list[Any] = []
app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
@with_options(Run, Server, without=["timeout"])
def run(
    name: Annotated[str, typer.Argument()],
    max_cost: Annotated[float | None, typer.Option(help="own text")] = None,
    options: dict[str, Any] = {},  # noqa: B006  # the decorator passes it
) -> None:
    """Run."""
    taken.append((name, max_cost, options))


def called(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    return result.exit_code, result.output


DEFAULTS = {"group_size": 8, "output": Path("out"), "overlap": False, "port": 8000, "engine": "auto"}


def test_an_option_without_a_default_of_its_own_is_missing_until_it_is_written() -> None:
    assert called("a")[0] == 0
    assert taken.pop() == ("a", None, DEFAULTS)
    words = "--group-size 2 --concurrency 4 --overlap --engine vllm --urls http://a,http://b --max-cost 1 --output x"
    assert called("a", *words.split())[0] == 0
    given = {"group_size": 2, "concurrency": 4, "overlap": True, "engine": "vllm", "output": Path("x")}
    assert taken.pop() == ("a", 1.0, DEFAULTS | given | {"urls": "http://a,http://b"})


def test_the_help_says_what_the_fields_say() -> None:
    text = " ".join(called("--help")[1].split())
    for shown in (
        "rollouts per scenario [default: 8; x>=2]",
        "rollouts at the same time [default: 32, or the app's limit] [x>=1]",
        "own text",
        "port to listen on [default: 8000; 0<=x<=65535]",
        "--engine <auto|vllm>",
        "shares of calls [default: 0,0.25,1]",
        "what divides the loss [default: tokens]",
        "URLs, comma-separated --",
        "--overlap / --no-overlap",
    ):
        assert shown in text
    assert not [name for name in ("--timeout", "--reward", "--seed", "--target") if name in text]


@pytest.mark.parametrize("words", ["--group-size 1", "--port 70000", "--engine other", "--concurrency x"])
def test_a_value_out_of_its_range_is_refused_with_its_option(words: str) -> None:
    code, output = called("a", *words.split())
    assert (code, f"Invalid value for '{words.split()[0]}'" in output) == (2, True), output
