"""Options of a command from the fields of a class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from offbook.base.config import Options
from offbook.base.options import Headline, RunOptions, option
from offbook.commands.generated_options import options_of, with_options
from offbook.commands.help_pages import HeadedCommand
from offbook.processes.command import CommandOptions
from offbook.trainer.options import TrainOptions


@dataclass(frozen=True, kw_only=True)
class Run(RunOptions):
    heading = "Rollouts"

    target: str
    group_size: Headline[int] = option(8, "rollouts per scenario", least=2)
    timeout: Headline[float] = option(300.0, "seconds per rollout")
    concurrency: Headline[int] = option(
        32, "rollouts at the same time", least=1, shown_default="32, or the app's limit"
    )
    max_cost: float | None = option(None, "USD to spend")
    output: Headline[Path] = option(Path("out"), "folder to write to")
    overlap: Headline[bool] = option(False, "overlap rollouts and updates")
    retries: int = option(0, "how often a rollout is repeated", least=0)
    curriculum: bool = option(True, "easier scenarios first")
    cap: float | None = option(2.0, "limit of a weight")
    reward: Callable[..., float] | None = option(None, "a function")
    seed: int = 0


class Server(Options):
    port: Headline[int] = Field(default=8000, ge=0, le=65535, description="port to listen on")
    engine: Headline[Literal["auto", "vllm"]] = Field(default="auto", description="the engine")
    urls: Headline[tuple[str, ...]] = Field(default=(), description="URLs")
    shares: tuple[float, ...] = Field(default=(0.0, 0.25, 1.0), description="shares of calls")
    divisor: float | Literal["tokens"] = Field(default="tokens", description="what divides the loss")


taken: list[Any] = []
app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=HeadedCommand)
@with_options(Run, Server, without=["timeout"])
def run(
    name: Annotated[str, typer.Argument()],
    max_cost: Annotated[float | None, typer.Option(help="own text")] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Run."""
    taken.append((name, max_cost, options))


def called(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def refused(*words: str) -> str:
    with pytest.raises(Exception) as caught:
        app(list(words), standalone_mode=False)
    return getattr(caught.value, "format_message", lambda: str(caught.value))()


def test_a_command_gets_the_options_that_the_user_set() -> None:
    assert called("a")[0] == 0
    assert taken.pop() == ("a", None, {})
    words = "--group-size 2 --concurrency 4 --overlap --engine vllm --max-cost 1 --output x"
    assert called("a", *words.split(), "--urls", '["http://a", "http://b"]')[0] == 0
    options = {"group_size": 2, "concurrency": 4, "overlap": True, "engine": "vllm", "output": Path("x")}
    assert taken.pop() == ("a", 1.0, options | {"urls": ("http://a", "http://b")})


def test_the_command_line_comes_before_set_and_set_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("retries = 1\ngroup_size = 3\nport = 1\nshares = [0.5, 1]\noutput = 'x'\n")
    words = [
        "a",
        "--config",
        str(file),
        "--set",
        "retries=2",
        "--set",
        "group-size=4",
        "--set",
        "cap=none",
        "--port",
        "5",
    ]
    assert called(*words)[0] == 0
    options = {"retries": 2, "group_size": 4, "port": 5, "shares": (0.5, 1.0), "output": Path("x"), "cap": None}
    assert taken.pop() == ("a", None, options)
    assert options_of(Server, options) == {"port": 5, "shares": (0.5, 1.0)}


def test_the_name_of_an_option_is_short_for_set() -> None:
    for words in (
        "--retries 2 --no-curriculum",
        "--set retries=2 --set curriculum=false",
    ):
        assert called("a", *words.split()) == (0, "")
        assert taken.pop() == ("a", None, {"retries": 2, "curriculum": False})


def test_the_help_has_headings_and_names_the_other_options() -> None:
    text = " ".join(called("--help")[1].split())
    for shown in (
        "Rollouts: --group-size",
        "rollouts per scenario [default: 8] [x>=2]",
        "rollouts at the same time [default: 32, or the app's limit] [x>=1]",
        "own text",
        "port to listen on [default: 8000] [0<=x<=65535]",
        "--engine <auto|vllm>",
        "--overlap / --no-overlap",
        "Other options (docs/options.md): retries, curriculum, cap, shares, divisor",
    ):
        assert shown in text
    assert not [name for name in ("--timeout", "--reward", "--seed", "--target") if name in text]


@pytest.mark.parametrize("words", ["--group-size 1", "--port 70000", "--engine other", "--concurrency x"])
def test_a_value_out_of_its_range_is_refused_with_its_option(words: str) -> None:
    code, output = called("a", *words.split())
    assert (code, f"Invalid value for '{words.split()[0]}'" in output) == (2, True), output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--set retries=-1", "'--retries': Input should be greater than or equal to 0"),
        ("--set port=x", "'--port': Input should be a valid integer"),
        ("--retries", "'--retries' requires an argument"),
        ("--set", "--set: a value is needed"),
        ("--set cap=nan", "--cap: Input should be a finite number (got 'nan')"),
        ("--set retrys=1", "--set: there is no option 'retrys': did you mean 'retries'?"),
        ("--set timeout=1", "--set: there is no option 'timeout'"),
        ("--set retries", "--set 'retries' is not of the form NAME=VALUE"),
        ("--set curriculum=2", "--curriculum: true or false is needed, got '2'"),
        ("--shares [1", "--shares: not JSON"),
        ("--config nowhere.toml", "--config: nowhere.toml cannot be read"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(words: str, message: str) -> None:
    assert message in refused("a", *words.split())


def test_a_bad_file_is_refused_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    for text, message in (
        ("retries = 'x'", "'--retries': Input should be"),
        ("retry = 1", f"{file}: there is no option 'retry'"),
    ):
        file.write_text(text)
        assert message in refused("a", "--config", str(file))


def test_an_option_of_a_program_is_none_of_the_trainer_whose_field_of_that_name_is_a_function() -> None:
    options = {"reward": "exit", "retries": 1}
    assert options_of(CommandOptions, options) == {"reward": "exit"}
    assert options_of(TrainOptions, options) == {"retries": 1}
