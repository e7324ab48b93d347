"""The command `offbook auto`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offbook.base.config import TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook.base.terminal import echo
from offbook.base.types import Json
from offbook.client.model import TrainableModel
from offbook.commands.generated_options import options_of, with_options
from offbook.commands.help_pages import more_option
from offbook.commands.option_values import train_config
from offbook.scenarios.identity import scenario_fields
from offbook.scenarios.loading import load_scenarios
from offbook_auto.described import AutoTrainer
from offbook_auto.estimate import plan_lines
from offbook_auto.options import BASE_MODEL, AutoOptions, name_of
from offbook_auto.task import read_task

Description = Annotated[
    str, typer.Argument(help="what the model is to do, in words; not needed if --output has a task.yaml")
]
Examples = Annotated[Path | None, typer.Option(help="JSONL or CSV file of examples: input, and output if known")]
Schema = Annotated[Path | None, more_option(help="file with a JSON schema; an answer that does not match it scores 0")]
Tools = Annotated[Path | None, more_option(help="file with function tools in OpenAI's format, as a JSON list")]
Base = Annotated[str, typer.Option(help="base of the model: tiny, tiny-mcp, a folder, or a Hugging Face name")]


@with_options(AutoOptions, TrainConfig, unlisted=["learning_rate"])
def auto(
    description: Description = "",
    base_model: Base = BASE_MODEL,
    model: Annotated[str | None, more_option(help="name of the model  [default: from the description]")] = None,
    examples: Examples = None,
    schema: Schema = None,
    tools: Tools = None,
    until: Annotated[
        Literal["task", "scenarios", "prompt", "rubric", "train", "compare"],
        typer.Option(help="last stage to run; you can edit its files before you continue"),
    ] = "compare",
    dry_run: Annotated[bool, typer.Option(help="show the planned requests and their price, and send nothing")] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Train a model from a description of its task alone.

    Another LLM writes inputs, a system prompt and a rubric. A judge scores the answers by the rubric. Each stage leaves a
    file in the output folder (task.yaml, scenarios.jsonl, prompt.md, rubric.md), which you may edit. An existing file is
    used as it is.

    \b
    Example:
      offbook auto 'Summarise a support e-mail in one sentence' --llm openai/gpt-4.1 --dry-run
    """
    chosen: dict[str, Any] = {**options_of(AutoOptions, options), "config": train_config(options)}
    if examples is not None:
        chosen["examples"] = [scenario_fields(one) for one in load_scenarios(examples)]
    if schema is not None:
        chosen["answer_schema"] = json_file(schema, "--schema", dict)
    if tools is not None:
        chosen["tools"] = json_file(tools, "--tools", list)
    task = (chosen.get("output") or Path()) / "task.yaml"
    name = model or name_of(description or (read_task(task).description if task.exists() else ""))
    trainer = AutoTrainer(description, model=TrainableModel(name, project="auto", base_model=base_model), **chosen)
    if dry_run:
        echo("\n".join(plan_lines(trainer.plan(), chosen.get("max_cost"))))
    else:
        trainer.run(until)


def json_file(file: Path, where: str, kind: type) -> Json:
    """The JSON value of a file. Raises ConfigError for another kind of value."""
    try:
        value: Json = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error}") from error
    if not isinstance(value, kind):
        raise ConfigError(f"{where}: {file} holds a {type(value).__name__}; a {kind.__name__} is needed")
    return value
