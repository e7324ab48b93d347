"""The command `offbook judge-check`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from offbook.base.terminal import echo
from offbook.trainer.judge_check import check_judge_on, read_ranked, ruler_at

from .help_pages import more_option
from .options import Results


def judge_check(
    file: Annotated[Path, typer.Argument(help="JSONL of rollouts that you ranked: group, messages, and score or rank")],
    judge: Annotated[str, typer.Option(help="LLM to check, such as openai/o3")],
    judge_api_base: Annotated[
        str | None, more_option(help="URL of the judge's endpoint  [default: the provider's]")
    ] = None,
    rubric: Annotated[Path | None, more_option(help="file with the judge's rubric  [default: built in]")] = None,
    reasoning: Annotated[bool, more_option("--reasoning", help="let the judge reason before it scores")] = False,
    results: Results = None,
) -> None:
    """Compare a judge's ranking of rollouts with yours.

    \b
    Example:
      offbook judge-check ranked.jsonl --judge openai/o3
    """
    ranked = read_ranked(file)
    check = asyncio.run(check_judge_on(ranked, ruler_at(judge, judge_api_base, rubric, reasoning=reasoning)))
    echo("\n".join(check.lines()))
    if results is not None:
        values = asdict(check) | {"tau": check.tau, "accuracy": check.accuracy}
        results.write_text(dumps(values, indent=1) + "\n", encoding="utf-8")
    if not check.groups:
        raise typer.Exit(1)
