"""The options of trainings from a description, and in the place of a model: names, defaults, meanings and checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.base.config import SFTConfig, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.options import Headline, RunOptions, option
from offbook.base.types import Json, Tool
from offbook.contracts import Judge
from offbook.llms.ledger import check_max_cost
from offbook.llms.llm import Llm
from offbook.trainer.options import Schedule, TrainerOptions, check_config
from offbook_compare.candidates import AS_IS, Candidate, as_candidate
from offbook_compare.options import check_measure

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
    steps: int = option(30, "total number of training steps; a second run continues where the first ended", least=1)
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
        check_folder(self.output, self.max_cost)
        check_config(self.config)


IMITATION = SFTConfig(epochs=2, skip_bad=True)
"""Default options of the supervised stage."""
ROUNDS_SET = ("eval_every", "run", "target_reward", "patience", "max_cost")
"""Options of a training that its rounds set themselves, or that the whole has one of."""


@dataclass(frozen=True, kw_only=True)
class ImproveOptions(RunOptions):
    """The options of an improvement beside those of its training. Raises ConfigError for an invalid value."""

    heading = "Improvement"

    teacher: Headline[str | Llm | None] = option(
        AS_IS, "model to imitate and to compare with: as-is (the app's own), or an LLM such as openai/gpt-4.1"
    )
    observe_rollouts: int = option(1, "runs of each training scenario on the teacher", least=1)
    success_at: float | None = option(
        None,
        "lowest reward that counts as a success",
        shown_default="the metric `success`; without it, the mean reward",
    )
    sft: SFTConfig = option(IMITATION, "options of the supervised training on good runs")
    round_steps: int = option(10, "steps per round of reinforcement learning", least=1)
    rounds: int = option(
        5,
        "most rounds of reinforcement learning; they end when held-out success stops rising; 0: imitation only",
        least=0,
    )
    gpu_price: float | None = option(None, "price of the machine that serves trained steps, in USD per hour", least=0)
    max_cost: float | None = option(None, "limit for other LLMs in all runs with this output folder, in USD")
    output: Headline[Path | None] = option(None, "folder for all files", shown_default="improve-NAME, from the model")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_folder(self.output, self.max_cost)
        check_measure(self.success_at, self.gpu_price)
        teacher = self.teaching()
        if teacher is not None and teacher.trained and teacher.step == 0:
            raise ConfigError("teacher: step:0 is the untrained base: name a later step, as-is, or another LLM")
        if not isinstance(self.sft, SFTConfig):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(f"sft: an offbook.SFTConfig is needed, got {self.sft!r:.200}")

    def teaching(self) -> Candidate | None:
        """The teacher as a candidate of comparisons; None for a training without one. Raises ConfigError."""
        return None if self.teacher is None else as_candidate(self.teacher)


def check_folder(output: Path | None, max_cost: float | None) -> None:
    """Raise ConfigError for an output that is a file, and for a limit of costs that is none."""
    if max_cost is not None:
        check_max_cost(max_cost)
    if output is not None and output.exists() and not output.is_dir():
        raise ConfigError(f"output: {output} is a file; a folder is needed")


def name_of(description: str) -> str:
    """A name of a task, for its folder and its model.

    >>> name_of("Turn clumsy notes into a ticket, as JSON!")
    'turn-clumsy-notes-into-a-ticket'
    """
    words = re.findall(r"[a-z0-9]+", description.lower())
    return "-".join(words[:6])[:60] or "task"
