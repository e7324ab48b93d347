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
from offbook.base.types import Message, Trajectory, TrajectoryGroup
from offbook.client.model import Model, TrainableModel
from offbook.contracts import Judge
from offbook.llms.llm import Llm
from offbook.llms.prices import UsedTokens, cost_of, price_of
from offbook.llms.provider import Tokens, load
from offbook.rewards.rubric import write_rubric
from offbook.rewards.ruler_judge import Ruler, tie
from offbook.trainer.report import TrainReport
from offbook.trainer.trainer import Trainer
from offbook_compare.candidates import CandidateLike, as_candidate
from offbook_compare.comparison import acompare
from offbook_compare.results import ComparisonReport

from .improve import Improver, Split, Stage
from .inputs import TaskInput, read_inputs, write_inputs
from .options import BASE_MODEL, AutoOptions, ImproveOptions, name_of
from .task import DESCRIBED, Task, as_examples, read_task, require_packages, write_task, write_whole
from .writer import PER_QUESTION, written_outline, written_prompt

CHARACTERS = 4
"""Characters of a token, about."""
FRAME = 400
"""Tokens that the words around a question take, with its JSON schema."""
OUTLINE, PROMPT, RUBRIC, INPUT = 500, 300, 350, 120
"""Tokens of what the LLM writes, about."""
VERDICT = 60
"""Tokens of a judge's score with its explanation."""
AGAIN = 1.2
"""Inputs asked for, for each that is kept."""
FITS = "fits_schema"
"""Metric of a rollout: 1 if its answer fits the task's schema, else 0."""


@dataclass(frozen=True)
class StagePlan:
    """What a stage will ask of other LLMs. `done`: its file is there, so that it asks nothing. `cost`: USD; None: unknown price."""

    stage: str
    done: bool
    questions: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0

    def line(self) -> str:
        """The plan as one line, for people."""
        if self.done:
            return f"{self.stage}: done"
        if not self.questions:
            return f"{self.stage}: asks no other LLM"
        price = "of unknown price" if self.cost is None else f"about {self.cost:.2f} USD"
        tokens = f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens"
        return f"{self.stage}: {self.questions:,} question{'s' * (self.questions != 1)}, {tokens}, {price}"


def tokens_of(text: str) -> int:
    """About how many tokens a text has."""
    return len(text) // CHARACTERS + 1


def planned(stage: str, llm: Llm | None, questions: int, prompt: float, completion: float) -> StagePlan:
    """The plan of a stage whose questions take so many tokens each. `llm` is None for a judge that is none."""
    if llm is None or not questions:
        return StagePlan(stage, False)
    price = price_of(llm.options, load().model_cost)
    tokens = Tokens(round(questions * prompt), round(questions * completion))
    cost = None if price is None else questions * cost_of(UsedTokens(round(prompt), round(completion)), price)
    return StagePlan(stage, False, questions, *tokens, cost)


def plan_lines(plans: Sequence[StagePlan], max_cost: float | None) -> list[str]:
    """A plan as lines for a terminal, with its sum."""
    costs = [plan.cost for plan in plans]
    known = sum(cost for cost in costs if cost is not None)
    total = f"in all about {known:.2f} USD" + (", and what has an unknown price" if None in costs else "")
    short = max_cost is not None and known > max_cost
    return [
        *(plan.line() for plan in plans),
        f"{total}; the tokens are estimates. Nothing was asked.",
        *([f"max_cost={max_cost:g} USD will end the run before it is through"] if short else []),
    ]


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

    def plan(self) -> list[StagePlan]:
        """Estimate the requests of each stage to other LLMs: tokens and price. Sends nothing."""
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

    def sizes(self) -> tuple[int, int]:
        """How many inputs there are, or will be, to train on and held out."""
        file = self.folder / "scenarios.jsonl"
        if not file.exists():
            return self.options.train_inputs, self.options.held_out
        splits = [one.split for one in read_inputs(file)]
        return splits.count("train"), splits.count("held-out")

    def input_stages(self) -> list[Stage]:
        """What writes the files that are not there."""
        return [("task", self._task), ("scenarios", self._inputs), ("prompt", self._prompt), ("rubric", self._rubric)]

    async def _task(self) -> None:
        file = self.folder / "task.yaml"
        if not file.exists():
            outline = await written_outline(self.llm, self.task, file.name)
            dimensions = {
                item.name: list(dict.fromkeys(value.strip() for value in item.values if value.strip()))
                for item in outline.dimensions
            }
            write_task(self.task.model_copy(update={"inputs": outline.inputs, "dimensions": dimensions}), file)
        self.task = read_task(file)
        echo(f"task ({file}): inputs vary in {', '.join(self.task.dimensions) or 'nothing that is named'}")

    async def _inputs(self) -> None:
        file, options = self.folder / "scenarios.jsonl", self.options
        if not file.exists():
            wanted: dict[Split, int] = {"train": options.train_inputs, "held-out": options.held_out}
            await write_inputs(self.llm, self.task, wanted, options.seed, file, echo)
        train, held_out = self.sizes()
        echo(f"scenarios ({file}): {train} to train on, {held_out} held out")

    async def _prompt(self) -> None:
        file = self.folder / "prompt.md"
        if not file.exists():
            write_whole(file, await written_prompt(self.llm, self.task, file.name) + "\n")
        echo(f"prompt ({file}):\n{self.texts()['prompt']}")

    async def _rubric(self) -> None:
        text = json.dumps(self.task.brief(), ensure_ascii=False, indent=1)
        await write_rubric(text, self.llm, file=self.folder / "rubric.md")

    def _scenarios(self, split: Split) -> list[dict[str, Any]]:
        return as_scenarios(read_inputs(self.folder / "scenarios.jsonl"), split, self.texts()["prompt"])

    async def trained(self, steps: int) -> TrainReport:
        """Train until the model has `steps` steps in total."""
        shared = ("group_size", "scenarios_per_step", "concurrency", "max_completion_tokens", "config", "seed")
        options: dict[str, Any] = {name: getattr(self.options, name) for name in shared}
        trainer = Trainer(self.model, AnswerOnce(self.task), self._scenarios("train"), judge=self.judge, **options)
        return await trainer.atrain(steps)

    async def compared(self, split: Split, candidates: Sequence[CandidateLike], **options: Any) -> ComparisonReport:
        """Compare on the inputs of a split, by the judge."""
        shared = {name: getattr(self.options, name) for name in ("concurrency", "max_completion_tokens", "seed")}
        return await acompare(
            AnswerOnce(self.task),
            self._scenarios(split),
            candidates,
            model=self.model,
            judge=self.judge,
            trained_on=self._scenarios("train") if split == "held-out" else None,
            **shared,
            **options,
        )

    def plan(self) -> list[StagePlan]:
        """Estimate the requests of each stage to other LLMs: tokens and price. Sends nothing."""
        options, llm, judge = self.options, self.llm, self.judge_llm
        about = tokens_of(json.dumps(self.task.brief()))
        file = self.folder / "scenarios.jsonl"
        inputs = read_inputs(file) if file.exists() else None
        length = INPUT if not inputs else sum(tokens_of(one.input) for one in inputs) / len(inputs)
        batches = round(AGAIN * (options.train_inputs + options.held_out) / PER_QUESTION + 1)
        answer = min(options.max_completion_tokens, 2 * INPUT)

        def shown(attempts: int) -> float:
            return FRAME + RUBRIC + PROMPT + length + attempts * answer

        stages = [
            ("task.yaml", planned("task", llm, 1, FRAME + about, OUTLINE)),
            ("scenarios.jsonl", planned("scenarios", llm, batches, FRAME + about + OUTLINE, PER_QUESTION * INPUT)),
            ("prompt.md", planned("prompt", llm, 1, FRAME + about, PROMPT)),
            ("rubric.md", planned("rubric", llm, 1, FRAME + about, RUBRIC)),
        ]
        judged, size, held_out = options.steps * options.scenarios_per_step, options.group_size, self.sizes()[1]
        return [
            *(StagePlan(own.stage, True) if (self.folder / name).exists() else own for name, own in stages),
            planned("train", judge, judged, shown(size), size * VERDICT),
            planned("compare", judge, held_out if held_out > 1 else 0, shown(2), 2 * VERDICT),
        ]


def _llm(where: str, value: str | Llm) -> Llm:
    """The LLM that a name means, with options as in `openai/NAME?api_base=URL`. Raises ConfigError."""
    llm = as_candidate(value).llm
    if llm is None:
        raise ConfigError(f"{where}: {value!r} is not an LLM elsewhere; name one, such as openai/gpt-4.1")
    return llm


def as_scenarios(inputs: Sequence[TaskInput], split: Split, prompt: str) -> list[dict[str, Any]]:
    """The scenarios of a split. They hold the prompt too, so that another prompt makes other scenarios."""
    return [{"id": one.id, "input": one.input, "system": prompt} for one in inputs if one.split == split]


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
