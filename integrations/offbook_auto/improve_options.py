"""The options of an improvement: names, defaults, meanings and checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offbook.base.config import SFTConfig
from offbook.base.errors import ConfigError
from offbook.base.options import Headline, RunOptions, option
from offbook.llms.ledger import check_max_cost
from offbook.llms.llm import Llm
from offbook_compare.candidates import AS_IS, Candidate, as_candidate
from offbook_compare.options import check_measure

IMITATION = SFTConfig(epochs=2, skip_bad=True)
"""Default options of the supervised stage."""
ROUNDS_SET = ("eval_every", "run", "target_reward", "patience", "max_cost")
"""Options of a training that its rounds set themselves, or that the whole has one of."""


@dataclass(frozen=True, kw_only=True)
class ImproveOptions(RunOptions):
    """The options of an improvement beside those of its training. Raises ConfigError for an invalid value."""

    heading = "Improvement"

    teacher: Headline[str | Llm] = option(
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
    rounds: Headline[int] = option(
        5,
        "most rounds of reinforcement learning; they end when held-out success stops rising; 0: imitation only",
        least=0,
    )
    gpu_price: float | None = option(None, "price of the machine that serves trained steps, in USD per hour", least=0)
    max_cost: float | None = option(None, "limit for other LLMs in all runs with this output folder, in USD")
    output: Headline[Path | None] = option(None, "folder for all files", shown_default="improve-NAME, from the model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_cost is not None:
            check_max_cost(self.max_cost)
        check_measure(self.success_at, self.gpu_price)
        if self.teaching().trained and self.teaching().step == 0:
            raise ConfigError("teacher: step:0 is the untrained base: name a later step, as-is, or another LLM")
        if not isinstance(self.sft, SFTConfig):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(f"sft: an offbook.SFTConfig is needed, got {self.sft!r:.200}")
        if self.output is not None and self.output.exists() and not self.output.is_dir():
            raise ConfigError(f"output: {self.output} is a file; a folder is needed")

    def teaching(self) -> Candidate:
        """The teacher as a candidate of comparisons. Raises ConfigError."""
        return as_candidate(self.teacher)
