"""Arguments and options that several commands share, each with its help text. An annotation is one parameter of a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from offbook.base.config import SFTConfig
from offbook.base.options import Headline, RunOptions, option

from .help_pages import more_option

Target = Annotated[
    str, typer.Argument(help="the object that `trainable` returned, as MODULE:NAME, such as my_app:agent")
]
"""The app to run: loaded with `load_target`."""
Scenarios = Annotated[Path, typer.Option(help="JSONL, JSON or CSV file")]
Model = Annotated[str, typer.Argument(help="name of the model, such as email-agent")]

Trace = Annotated[str | None, more_option(help="trace sinks for the rollouts, comma-separated, such as langfuse,wandb")]
Results = Annotated[Path | None, typer.Option(help="file to write the results to, as JSON")]

Server = Annotated[str | None, typer.Option(help="URL of a running server  [default: the one on this machine]")]
Dir = Annotated[Path | None, typer.Option(help="directory of the server  [default: ./.offbook]")]
Env = Annotated[
    list[str],
    more_option(help="variable for the program, which gets none that looks like a secret: NAME or NAME=value"),
]


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(RunOptions):
    """The judge of a command: RULER scores rollouts; in a comparison, the candidates' rollouts of a scenario."""

    heading = "Judge"

    judge: Headline[str | None] = option(None, "LLM that scores the rollouts, such as openai/o3")
    judge_api_base: str | None = option(None, "URL of the judge's endpoint", shown_default="the provider's")
    rubric: Path | None = option(None, "file with the judge's rubric", shown_default="built in")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(RunOptions):
    """The model of a command."""

    heading = "Model"

    model: Headline[str | None] = option(
        None, "name of the model to train, if the target names none; needs --base-model"
    )
    base_model: Headline[str | None] = option(
        None, "base of the model --model: tiny, tiny-mcp, a folder, or a Hugging Face name"
    )


@dataclass(frozen=True, kw_only=True)
class ImitationOptions(RunOptions):
    """The supervised stage of a command."""

    heading = "Imitation"

    sft_epochs: int = option(2, "passes over the good runs", least=1)
    sft_learning_rate: float = option(2e-4, "learning rate of the imitation")
    sft_batch_size: int = option(8, "conversations per update", least=1)

    def config(self) -> SFTConfig:
        """The options of the supervised training. Raises ConfigError."""
        return SFTConfig.parse(
            epochs=self.sft_epochs,
            learning_rate=self.sft_learning_rate,
            batch_size=self.sft_batch_size,
            skip_bad=True,
        )
