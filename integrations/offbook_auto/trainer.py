"""`AutoTrainer`: from a description to a trained model, stage by stage. `AutoTrainer._stages` is the order."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from offbook.base.errors import BudgetExceeded, ConfigError
from offbook.base.json_files import read_text
from offbook.base.options import option, takes
from offbook.base.sync_calls import run_sync
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.client.model import TrainableModel
from offbook.contracts import Judge
from offbook.llms.llm import Llm
from offbook.rewards.rubric import write_rubric
from offbook.rewards.ruler_judge import Ruler
from offbook.trainer.report import Stopped, TrainReport
from offbook.trainer.trainer import Trainer
from offbook_compare.candidates import as_candidate
from offbook_compare.comparison import acompare
from offbook_compare.results import ComparisonReport

from .estimate import AGAIN, FRAME, INPUT, OUTLINE, PROMPT, RUBRIC, VERDICT, StagePlan, planned, tokens_of
from .inputs import Split, TaskInput, read_inputs, write_inputs
from .options import BASE_MODEL, AutoOptions, name_of
from .report import AutoReport, write_report
from .rollout import AnswerOnce, FittingJudge, as_scenarios
from .stages import StagesRun, run_stages
from .task import DESCRIBED, Task, as_examples, read_task, require_packages, write_task, write_whole
from .writer import PER_QUESTION, written_outline, written_prompt

Stage = Literal["task", "scenarios", "prompt", "rubric", "train", "compare"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class AutoArguments(AutoOptions):
    """The arguments of an AutoTrainer."""

    description: str = ""
    _: KW_ONLY
    model: TrainableModel | None = option(
        None, "the model to train", shown_default=f"one on {BASE_MODEL}, named by the description"
    )


class AutoTrainer:
    """Trains a model from a description of its task: `AutoTrainer("turn notes into a ticket", llm="openai/gpt-4.1").run()`.

    Each stage writes a file to the folder `output`. You may edit the files or write them yourself: an existing file is
    used as it is. For the options see `AutoOptions`. Raises ConfigError, MissingExtraError."""

    @takes(AutoArguments, "AutoTrainer")
    def __init__(self, options: AutoArguments) -> None:
        require_packages()
        self.options = options
        name = name_of(options.description) if options.model is None else options.model.name
        if options.output is None and not options.description.strip():
            raise ConfigError("description: say what the model is to do, or name the output folder of an earlier run")
        self.folder = options.output or Path(f"auto-{name}")
        self.llm = _llm("llm", options.llm)
        self._own_judge = options.judge
        self.judge_llm = _judge_llm(options.judge, self.llm)
        self._known_model = options.model

    def run(self, until: Stage = "compare") -> AutoReport:
        """The sync form of `arun`. Raises WrongLoopError inside a running event loop."""
        return run_sync(self.arun, until)

    async def arun(self, until: Stage = "compare") -> AutoReport:
        """Run the stages up to `until` that have no result yet, and write report.md.

        If `max_cost` is spent, the run ends without an error. Raises ConfigError for a file that cannot be used,
        LlmError for an LLM whose answers are invalid, and the errors of `Trainer` and `compare`."""
        if until not in STAGES:
            raise ConfigError(f"until: one of {', '.join(STAGES)} is needed, got {until!r}")
        self._check_description()
        progress = AutoProgress(self._given_or_known())
        stages = [(stage, partial(run, progress)) for stage, run in self._stages()]
        report = self._report(progress, await run_stages(stages, until, self.folder, self.options.max_cost))
        write_report(report, self.folder)
        echo("\n".join(report.lines()))
        return report

    def plan(self) -> list[StagePlan]:
        """Estimate the requests of each stage to other LLMs: tokens and price. Sends nothing."""
        self._check_description()
        options, llm, judge = self.options, self.llm, self.judge_llm
        has = {
            name: (self.folder / name).exists() for name in ("task.yaml", "scenarios.jsonl", "prompt.md", "rubric.md")
        }
        task = self._given_or_known()
        about = tokens_of(json.dumps(task.brief()))
        inputs = read_inputs(self.folder / "scenarios.jsonl") if has["scenarios.jsonl"] else None
        held_out = options.held_out if inputs is None else sum(one.split == "held-out" for one in inputs)
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
        judged, size = options.steps * options.scenarios_per_step, options.group_size
        return [
            *(StagePlan(own.stage, True) if has[name] else own for name, own in stages),
            planned("train", judge, judged, shown(size), size * VERDICT),
            planned("compare", judge, held_out if held_out > 1 else 0, shown(2), 2 * VERDICT),
        ]

    def _stages(self) -> list[tuple[Stage, Callable[[AutoProgress], Awaitable[None]]]]:
        return [
            ("task", self._task),
            ("scenarios", self._inputs),
            ("prompt", self._prompt),
            ("rubric", self._rubric),
            ("train", self._train),
            ("compare", self._compare),
        ]

    def _check_description(self) -> None:
        """Raise ConfigError for a folder that holds another task, or none where no description is given."""
        file, own = self.folder / "task.yaml", self.options.description.strip()
        if not file.exists():
            if not own:
                raise ConfigError(f"description: {file} does not exist, so say what the model is to do")
            return
        known = read_task(file).description
        if own and own != known.strip():
            raise ConfigError(
                f"{file} describes another task, {known:.{DESCRIBED}}: leave the description out to continue with it, "
                "or choose another output folder"
            )

    def _given_or_known(self) -> Task:
        """task.yaml, or without it the task as far as the options tell it. Raises ConfigError."""
        file, options = self.folder / "task.yaml", self.options
        if file.exists():
            return read_task(file)
        return Task(
            description=options.description.strip(),
            examples=as_examples(options.examples),
            answer_schema=None if options.answer_schema is None else dict(options.answer_schema),
            tools=[dict(tool) for tool in options.tools],
        )

    async def _task(self, progress: AutoProgress) -> None:
        file = self.folder / "task.yaml"
        if not file.exists():
            task = progress.task
            outline = await written_outline(self.llm, task, file.name)
            dimensions = {
                item.name: list(dict.fromkeys(value.strip() for value in item.values if value.strip()))
                for item in outline.dimensions
            }
            write_task(task.model_copy(update={"inputs": outline.inputs, "dimensions": dimensions}), file)
        progress.task = read_task(file)
        echo(f"task ({file}): inputs vary in {', '.join(progress.task.dimensions) or 'nothing that is named'}")

    async def _inputs(self, progress: AutoProgress) -> None:
        file, options = self.folder / "scenarios.jsonl", self.options
        if not file.exists():
            wanted: dict[Split, int] = {"train": options.train_inputs, "held-out": options.held_out}
            await write_inputs(self.llm, progress.task, wanted, options.seed, file, echo)
        progress.inputs = read_inputs(file)
        held_out = sum(one.split == "held-out" for one in progress.inputs)
        echo(f"scenarios ({file}): {len(progress.inputs) - held_out} to train on, {held_out} held out")

    async def _prompt(self, progress: AutoProgress) -> None:
        file = self.folder / "prompt.md"
        if not file.exists():
            write_whole(file, await written_prompt(self.llm, progress.task, file.name) + "\n")
        progress.prompt = read_text(file).strip()
        echo(f"prompt ({file}):\n{progress.prompt}")

    async def _rubric(self, progress: AutoProgress) -> None:
        text = json.dumps(progress.task.brief(), ensure_ascii=False, indent=1)
        progress.rubric = await write_rubric(text, self.llm, file=self.folder / "rubric.md")

    async def _train(self, progress: AutoProgress) -> None:
        options = self.options
        trainer = Trainer(
            self._model(progress.task),
            AnswerOnce(progress.task),
            as_scenarios(progress.inputs, "train", progress.prompt),
            judge=self._judge(progress),
            group_size=options.group_size,
            scenarios_per_step=options.scenarios_per_step,
            concurrency=options.concurrency,
            max_completion_tokens=options.max_completion_tokens,
            config=options.config,
            seed=options.seed,
        )
        progress.training = await trainer.atrain(options.steps)
        if progress.training.stopped is Stopped.BUDGET:
            raise BudgetExceeded("max_cost for other LLMs is spent: raise it to continue")

    async def _compare(self, progress: AutoProgress) -> None:
        held_out = as_scenarios(progress.inputs, "held-out", progress.prompt)
        model = self._model(progress.task)
        if len(held_out) < 2 or not await model.get_step():
            echo(
                f"no comparison: {counted(len(held_out), 'held-out input')}, and the model is at step {await model.get_step()}"
            )
            return
        progress.comparison = await acompare(
            AnswerOnce(progress.task),
            held_out,
            ["step:0", "step:newest"],
            model=model,
            judge=self._judge(progress),
            output=self.folder / "comparison",
            trained_on=as_scenarios(progress.inputs, "train", progress.prompt),
            concurrency=self.options.concurrency,
            max_completion_tokens=self.options.max_completion_tokens,
            seed=self.options.seed,
        )

    def _model(self, task: Task) -> TrainableModel:
        if self._known_model is None:
            self._known_model = TrainableModel(name_of(task.description), project="auto", base_model=BASE_MODEL)
        return self._known_model

    def _judge(self, progress: AutoProgress) -> Judge:
        own = self._own_judge
        judge: Judge = Ruler(self.judge_llm, rubric=progress.rubric) if self.judge_llm is not None else own  # type: ignore[assignment]
        return FittingJudge(judge, progress.task) if progress.task.answer_schema is not None else judge

    def _report(self, progress: AutoProgress, ran: StagesRun) -> AutoReport:
        return AutoReport(
            folder=self.folder,
            description=progress.task.description,
            model=None if self._known_model is None else self._known_model.name,
            base_model=BASE_MODEL if self._known_model is None else self._known_model.base_model,
            reached=ran.reached,
            stopped=ran.stopped,
            inputs=tuple(progress.inputs),
            prompt=progress.prompt,
            rubric=progress.rubric,
            training=progress.training,
            comparison=progress.comparison,
            spending=ran.spending,
        )


@dataclass
class AutoProgress:
    """What the stages have made so far. A stage reads what earlier ones made."""

    task: Task
    inputs: list[TaskInput] = field(default_factory=list[TaskInput])
    prompt: str = ""
    rubric: str = ""
    training: TrainReport | None = None
    comparison: ComparisonReport | None = None


def _llm(where: str, value: str | Llm) -> Llm:
    """The LLM that a name means, with options as in `openai/NAME?api_base=URL`. Raises ConfigError."""
    llm = as_candidate(value).llm
    if llm is None:
        raise ConfigError(f"{where}: {value!r} is not an LLM elsewhere; name one, such as openai/gpt-4.1")
    return llm


def _judge_llm(judge: str | Llm | Judge | None, default: Llm) -> Llm | None:
    """The LLM behind the judge; None for a judge of another kind, such as a function."""
    if judge is None:
        return default
    return _llm("judge", judge) if isinstance(judge, str | Llm) else None
