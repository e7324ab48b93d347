"""A task by its description: an LLM writes the task, its inputs, a system prompt and a rubric, each to a file that people may
edit or write themselves; a judge scores the answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from offbook.base.choices import as_message
from offbook.base.errors import ConfigError
from offbook.base.json_files import read_text
from offbook.base.options import option, takes
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.types import Message, Trajectory, TrajectoryGroup
from offbook.client.model import Model, TrainableModel
from offbook.contracts import Judge
from offbook.llms.llm import Llm
from offbook.llms.prices import UsedTokens, cost_of, price_of
from offbook.llms.provider import load
from offbook.rewards.rubric import write_rubric
from offbook.rewards.ruler_judge import Ruler, tie
from offbook.trainer.report import TrainReport
from offbook.trainer.trainer import Trainer
from offbook_compare.candidates import CandidateLike, as_candidate
from offbook_compare.comparison import acompare
from offbook_compare.results import ComparisonReport

from .improve import Improver
from .inputs import read_inputs, write_inputs
from .options import BASE_MODEL, AutoOptions, ImproveOptions, name_of
from .sources import Split, Stage
from .task import DESCRIBED, Task, as_examples, read_task, require_packages, write_task, write_whole
from .writer import PER_QUESTION, written_outline, written_prompt

READ, WRITTEN = 1_000, 400
"""Tokens of a question without the answers that it shows, and of a file that the LLM writes, about."""
INPUT, ANSWER, VERDICT = 120, 240, 60
"""Tokens of an input, of an answer, and of a judge's verdict on one, about."""
AGAIN = 1.2
"""Inputs asked for, for each that is kept."""
FITS = "fits_schema"
"""Metric of a rollout: 1 if its answer fits the task's schema, else 0."""


@dataclass(frozen=True)
class AutoArguments(AutoOptions):
    """The arguments of an AutoTrainer."""

    description: str = ""
    _: KW_ONLY
    model: TrainableModel | None = option(
        None, "the model to train", shown_default=f"one on {BASE_MODEL}, named by the description"
    )


class AutoTrainer(Improver):
    """Trains a model from a description of its task: `AutoTrainer("turn notes into a ticket", llm="openai/gpt-4.1").run()`.

    Each stage writes a file to the folder `output`. You may edit the files or write them yourself: an existing file is
    used as it is. For the options see `AutoOptions`. Raises ConfigError, MissingExtraError."""

    @takes(AutoArguments, "AutoTrainer")
    def __init__(self, options: AutoArguments) -> None:
        require_packages()
        task = described(options)
        path = ImproveOptions(teacher=None, round_steps=options.steps, max_cost=options.max_cost, output=task.folder)
        super().__init__(task, path)
        self._task = task

    def plan(self) -> list[str]:
        """The questions to other LLMs that are left, with about their price, in lines. Sends nothing."""
        return self._task.plan()


def described(options: AutoArguments) -> DescribedTask:
    """The task of these options. Raises ConfigError for a folder that holds another task, or none to begin with."""
    own = options.description.strip()
    if options.output is None and not own:
        raise ConfigError("description: say what the model is to do, or name the output folder of an earlier run")
    name = name_of(own) if options.model is None else options.model.name
    folder = options.output or Path(f"auto-{name}")
    file = folder / "task.yaml"
    if not file.exists():
        if not own:
            raise ConfigError(f"description: {file} does not exist, so say what the model is to do")
        examples, schema = as_examples(options.examples), options.answer_schema
        tools = [dict(tool) for tool in options.tools]
        task = Task(
            description=own, examples=examples, answer_schema=None if schema is None else dict(schema), tools=tools
        )
    else:
        task = read_task(file)
        if own and own != task.description.strip():
            raise ConfigError(
                f"{file} describes another task, {task.description:.{DESCRIBED}}: leave the description out to continue with "
                "it, or choose another output folder"
            )
    model = options.model or TrainableModel(name_of(task.description), project="auto", base_model=BASE_MODEL)
    return DescribedTask(options, folder, task, model)


@dataclass
class DescribedTask:
    """The TrainingSource. `task`: as the options tell it, until its stage has run."""

    options: AutoArguments
    folder: Path
    task: Task
    model: TrainableModel

    def __post_init__(self) -> None:
        self.llm = _llm("llm", self.options.llm)
        judge = self.options.judge
        self.judge_llm = self.llm if judge is None else _llm("judge", judge) if isinstance(judge, str | Llm) else None

    @property
    def judge(self) -> Judge:
        """The judge by the rubric; an answer that does not fit the task's schema scores 0."""
        own = self.options.judge
        judge: Judge = (
            Ruler(self.judge_llm, rubric=self.texts().get("rubric", "")) if self.judge_llm is not None else own
        )  # type: ignore[assignment]
        return FittingJudge(judge, self.task) if self.task.answer_schema is not None else judge

    def texts(self) -> Mapping[str, str]:
        """The prompt and the rubric, as far as they are written."""
        files = {name: self.folder / f"{name}.md" for name in ("prompt", "rubric")}
        return {name: read_text(file).strip() for name, file in files.items() if file.exists()}

    def input_stages(self) -> list[Stage]:
        """What writes the files that are not there."""
        return [("task", self._task), ("scenarios", self._inputs), ("prompt", self._prompt), ("rubric", self._rubric)]

    async def _task(self) -> None:
        file = self.folder / "task.yaml"
        if not file.exists():
            outline = await written_outline(self.llm, self.task, file.name)
            named = {item.name: {value.strip(): None for value in item.values} for item in outline.dimensions}
            dimensions = {name: [*values] for name, values in named.items() if len(values) > 1 and "" not in values}
            write_task(self.task.model_copy(update={"inputs": outline.inputs, "dimensions": dimensions}), file)
        self.task = read_task(file)
        echo(f"task ({file}): inputs vary in {', '.join(self.task.dimensions) or 'nothing that is named'}")

    async def _inputs(self) -> None:
        file, options = self.folder / "scenarios.jsonl", self.options
        if not file.exists():
            wanted: dict[Split, int] = {"train": options.train_inputs, "held-out": options.held_out}
            await write_inputs(self.llm, self.task, wanted, options.seed, file)
        splits = [one.split for one in read_inputs(file)]
        echo(f"scenarios ({file}): {splits.count('train')} to train on, {splits.count('held-out')} held out")

    async def _prompt(self) -> None:
        file = self.folder / "prompt.md"
        if not file.exists():
            write_whole(file, await written_prompt(self.llm, self.task, file.name) + "\n")
        echo(f"prompt ({file}):\n{self.texts()['prompt']}")

    async def _rubric(self) -> None:
        text = json.dumps(self.task.brief(), ensure_ascii=False, indent=1)
        await write_rubric(text, self.llm, file=self.folder / "rubric.md")

    def scenarios(self, split: Split) -> list[dict[str, Any]]:
        """The scenarios of a split, by the files. They hold the prompt too, so that another prompt makes other scenarios."""
        prompt, inputs = self.texts()["prompt"], read_inputs(self.folder / "scenarios.jsonl")
        return [{"id": one.id, "input": one.input, "system": prompt} for one in inputs if one.split == split]

    async def trained(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total."""
        shared = ("group_size", "scenarios_per_step", "concurrency", "max_completion_tokens", "config", "seed")
        options: dict[str, Any] = {name: getattr(self.options, name) for name in shared}
        trainer = Trainer(self.model, AnswerOnce(self.task), self.scenarios("train"), judge=self.judge, **options)
        return await trainer.atrain(steps)

    async def compared(self, split: Split, candidates: Sequence[CandidateLike], **options: Any) -> ComparisonReport:
        """Compare on the inputs of a split, by the judge."""
        shared = {name: getattr(self.options, name) for name in ("concurrency", "max_completion_tokens")}
        return await acompare(
            AnswerOnce(self.task),
            self.scenarios(split),
            candidates,
            model=self.model,
            judge=self.judge,
            trained_on=self.scenarios("train") if split == "held-out" else None,
            **shared,
            **options,
        )

    def plan(self) -> list[str]:
        """The questions to other LLMs that are left, with about their price, in lines. Sends nothing."""
        options = self.options
        batches = round(AGAIN * (options.train_inputs + options.held_out) / PER_QUESTION + 1)
        files = {name: (1, WRITTEN) for name in ("task.yaml", "prompt.md", "rubric.md")}
        files["scenarios.jsonl"] = (batches, PER_QUESTION * INPUT)
        asked = [
            (file, self.llm, number, READ, written)
            for file, (number, written) in files.items()
            if not (self.folder / file).exists()
        ]
        judged = options.steps * options.scenarios_per_step
        for stage, number, shown in (("train", judged, options.group_size), ("compare", options.held_out, 2)):
            if self.judge_llm is not None:
                asked.append((stage, self.judge_llm, number, READ + shown * ANSWER, shown * VERDICT))
        lines, total = list[str](), 0.0
        for name, llm, questions, read, written in asked:
            price = price_of(llm.options, load().model_cost)
            cost = None if price is None else questions * cost_of(UsedTokens(read, written), price)
            shown_cost = "of unknown price" if cost is None else f"about {cost:.2f} USD"
            lines.append(f"{name}: {counted(questions, 'question')}, {shown_cost}")
            total += cost or 0.0
        lines.append(f"in all about {total:.2f} USD, by estimated tokens. Nothing was asked.")
        if options.max_cost is not None and total > options.max_cost:
            lines.append(f"max_cost={options.max_cost:g} USD will end the run before it is through")
        return lines


def _llm(where: str, value: str | Llm) -> Llm:
    """The LLM that a name means, with options as in `openai/NAME?api_base=URL`. Raises ConfigError."""
    llm = as_candidate(value).llm
    if llm is None:
        raise ConfigError(f"{where}: {value!r} is not an LLM elsewhere; name one, such as openai/gpt-4.1")
    return llm


@dataclass(frozen=True)
class AnswerOnce:
    """The rollout function: the system prompt, the input, and the model's answer; calls of tools are not run."""

    task: Task

    async def __call__(self, model: Model[Any], scenario: dict[str, Any]) -> Trajectory:
        """Ask the model once."""
        messages: list[Message] = [{"role": "user", "content": scenario["input"]}]
        if scenario["system"]:
            messages.insert(0, {"role": "system", "content": scenario["system"]})
        trajectory = Trajectory(messages_and_choices=list(messages), tools=self.task.tools or None)
        offered: dict[str, Any] = {"tools": self.task.tools} if self.task.tools else {}
        create: Any = model.openai_client().chat.completions.create
        answer = await create(model=model.inference_name(), messages=messages, **offered)
        trajectory.messages_and_choices.append(answer.choices[0])
        return trajectory


@dataclass(frozen=True)
class FittingJudge:
    """A judge whose score counts only for answers that fit the task's schema; the others score 0."""

    judge: Judge
    task: Task

    async def __call__(self, group: TrajectoryGroup) -> TrajectoryGroup | None:
        """The judged group. Raises as the judge."""
        scored = await self.judge(group)
        if scored is None or self.task.answer_schema is None:
            return scored
        fitted = [self._fitted(item) for item in scored]
        return scored.model_copy(update={"trajectories": fitted, "metrics": {**scored.metrics, **tie(fitted)}})

    def _fitted(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.exception is not None or trajectory.reward is None:
            return trajectory
        fault = self.task.faults(str(as_message(trajectory.entries()[-1]).get("content") or ""))
        metrics = {**trajectory.metrics, FITS: float(not fault)}
        if not fault:
            return trajectory.model_copy(update={"metrics": metrics})
        logs = [*trajectory.logs, f"scores 0, its answer does not fit the schema: {fault:.300}"]
        return trajectory.model_copy(update={"reward": 0.0, "metrics": metrics, "logs": logs})
