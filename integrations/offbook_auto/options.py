"""The options of a training from a description: names, defaults, meanings and checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.base.config import TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.options import Headline, RunOptions, option
from offbook.base.types import Json, Tool
from offbook.contracts import Judge
from offbook.llms.ledger import check_max_cost
from offbook.llms.llm import Llm
from offbook.trainer.options import Schedule, TrainerOptions, check_config

BASE_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


@dataclass(frozen=True, kw_only=True)
class AutoOptions(RunOptions):
    """The options of an AutoTrainer. Raises ConfigError for an invalid value."""

    heading = "Training"

    llm: Headline[str | Llm] = option("", "LLM that writes the task, inputs, prompt and rubric, such as openai/gpt-4.1")
    judge: str | Llm | Judge | None = option(None, "LLM, or a judge, that scores the answers; None: `llm`")
    examples: Sequence[str | Mapping[str, Json]] = option((), "inputs, or mappings of `input` and `output`")
    answer_schema: Mapping[str, Json] | None = option(None, "JSON schema; an answer that does not match it scores 0")
    tools: Sequence[Tool] = option((), "function tools in OpenAI's format; the calls are the answer and are not run")
    train_inputs: int = option(80, "inputs to train on", least=1)
    held_out: int = option(40, "inputs to compare on before and after training", least=2)
    steps: Headline[int] = option(
        30, "total number of training steps; a second run continues where the first ended", least=1
    )
    group_size: int = option(TrainerOptions.group_size, "answers per input, which the judge compares", least=2)
    scenarios_per_step: int = option(TrainerOptions.scenarios_per_step, "inputs per step", least=1)
    concurrency: int = option(32, "answers that are sampled at the same time", least=1)
    max_completion_tokens: int = option(512, "limit of each answer, in tokens", least=1)
    config: TrainConfig | Schedule = option(TrainConfig(), "options of the learner, or a schedule of them")
    max_cost: Headline[float | None] = option(None, "limit for other LLMs in all runs with this output folder, in USD")
    seed: int = option(0, "random seed for the variety and order of the inputs")
    output: Headline[Path | None] = option(
        None, "folder for all files", shown_default="auto-NAME, from the description"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.llm:
            raise ConfigError("llm: name the LLM that writes inputs, prompt and rubric, such as openai/gpt-4.1")
        if self.max_cost is not None:
            check_max_cost(self.max_cost)
        check_config(self.config)
        if self.output is not None and self.output.exists() and not self.output.is_dir():
            raise ConfigError(f"output: {self.output} is a file; a folder is needed")


def name_of(description: str) -> str:
    """A name of a task, for its folder and its model.

    >>> name_of("Turn clumsy notes into a ticket, as JSON!")
    'turn-clumsy-notes-into-a-ticket'
    """
    words = re.findall(r"[a-z0-9]+", description.lower())
    return "-".join(words[:6])[:60] or "task"
