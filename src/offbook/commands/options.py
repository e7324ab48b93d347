"""Arguments and options that several commands share, each with its help text. An annotation is one parameter of a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbook.base.errors import ConfigError

Target = Annotated[
    str, typer.Argument(help="the object that `trainable` returned, as MODULE:NAME, such as my_app:agent")
]
"""The app to run: loaded with `load_target`."""
Scenarios = Annotated[Path, typer.Option(help="JSONL or CSV file, or FOLDER[:SPLIT] of a saved Hugging Face dataset")]
Model = Annotated[str, typer.Argument(help="name of the model, such as email-agent")]

SuccessAt = Annotated[float | None, typer.Option(help="lowest reward that counts as a success")]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="name of the model to train, if the target names none; needs --base-model"),
]
BaseModel = Annotated[
    str | None, typer.Option(help="base of the model --model: tiny, tiny-mcp, a folder, or a Hugging Face name")
]

MinReward = Annotated[
    float | None,
    typer.Option(help="imitate rollouts with at least this reward, with the loss cross_entropy", show_default="off"),
]
JudgeModel = Annotated[str | None, typer.Option("--judge", help="LLM that scores the rollouts, such as openai/o3")]
"""`train` and `eval` score with RULER; `compare` compares the candidates' rollouts of a scenario."""
JudgeBase = Annotated[str | None, typer.Option(help="URL of the judge's endpoint  [default: the provider's]")]
RubricFile = Annotated[Path | None, typer.Option(help="file with the judge's rubric  [default: built in]")]
Trace = Annotated[
    str | None, typer.Option(help="trace sinks for the rollouts, comma-separated, such as langfuse,wandb")
]
Results = Annotated[Path | None, typer.Option(help="file to write the results to, as JSON")]

Server = Annotated[str | None, typer.Option(help="URL of a running server  [default: the one on this machine]")]
Dir = Annotated[Path | None, typer.Option(help="directory of the server  [default: ./.offbook]")]
Env = Annotated[
    list[str],
    typer.Option(help="variable for the program, which gets none that looks like a secret: NAME or NAME=value"),
]
StoreUrl = Annotated[str | None, typer.Option(help="SQLAlchemy URL of the records, if they are not in --dir")]
SftEpochs = Annotated[int, typer.Option(min=1, help="passes over the good runs")]
SftRate = Annotated[float, typer.Option(help="learning rate of the imitation")]
SftBatch = Annotated[int, typer.Option(min=1, help="conversations per update")]


def refuse_words(context: typer.Context) -> None:
    """Raise ConfigError for words that are no option of the command: most are meant as its directory."""
    if context.args:
        word = context.args[0]
        raise ConfigError(f"unexpected argument {word!r}: to choose the server's directory, write --dir {word}")
