"""The quickstart: evaluate an agent, train it, evaluate it again, and print what changed. `quickstart` has the steps in
order."""

from __future__ import annotations

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# The type of create_agent's context is partly unknown.
import asyncio
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph  # pyright: ignore[reportMissingTypeStubs]
from pydantic import SecretStr
from rich.console import Console

from offbook.base.config import TrainConfig
from offbook.base.console import Terminal
from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.json_files import read_json
from offbook.base.server_options import EngineOptions
from offbook.base.types import Json, Message
from offbook.client.local import LocalBackend, shell_command
from offbook.client.model import TrainableModel
from offbook.contracts import GroupsFinished, TraceSink
from offbook.tracing.rollout_reader import conversations
from offbook.trainer.report import TrainReport
from offbook_langgraph import trainable

from .desk import Desk, Request, reward

try:
    from matplotlib.figure import Figure
except ImportError:  # of the extra `plot`; `main` reports it
    Figure = None


TRAIN_REQUESTS, TEST_REQUESTS = 600, 120
GROUP_SIZE, SCENARIOS_PER_STEP = 8, 12
STEPS = 36


@dataclass(frozen=True)
class Rates:
    """Success rate on the held-out requests, 0 to 1: at temperature 0 (greedy), and at temperature 1 (sampled)."""

    greedy: float
    sampled: float


@cache
def desk_agent(database: Path) -> CompiledStateGraph[Any, Any, Any, Any]:
    """A LangGraph agent with the order desk's tools."""
    return create_agent(
        ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused"), max_completion_tokens=48), Desk(database).tools()
    )


def trainable_agent(desk: Desk, model: TrainableModel) -> Any:
    """The agent, made trainable by the call of `trainable`."""

    def score(request: Request, state: dict[str, list[BaseMessage]]) -> dict[str, float]:
        return reward(request, state["messages"])

    return trainable(desk_agent(desk.path), model=model, reward=score)


def schedule(step: int, steps: int) -> TrainConfig:
    """The options of a step. The learning rate and the KL coefficient fall linearly to 0.

    The KL term keeps the policy near its base, which calls all tools that fit, until training has shown which of them
    are right."""
    left = 1 - (step - 1) / steps
    return TrainConfig(learning_rate=3.3e-3 * left, kl_coef=0.3 * left, minibatches=4)


async def evaluate(agent: Any, test: Sequence[Request], sink: Transcripts) -> Rates:
    """Both success rates of the newest step."""
    rates: list[float] = []
    for temperature in (0.0, 1.0):
        evaluation = await agent.aevaluate(test, temperature=temperature, concurrency=64, timeout=300, sinks=[sink])
        rates.append(evaluation.success or 0.0)
    return Rates(*rates)


def rates_line(when: str, rates: Rates) -> str:
    """The rates as one line, such as `before: greedy 40%, ...`."""
    return f"{when}: greedy {rates.greedy:.0%}, sampled {rates.sampled:.0%} of {TEST_REQUESTS} held-out requests right"


async def rates_before(file: Path, agent: Any, test: Sequence[Request], sink: Transcripts) -> Rates:
    """The rates of the untrained policy. They are kept in `file`, so that a resumed run does not measure them again."""
    if file.exists():
        try:
            return Rates(**read_json(file))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{file} cannot be read ({error}): delete it to have the policy measured again"
            ) from error
    rates = await evaluate(agent, test, sink)
    file.write_text(json.dumps(asdict(rates)), encoding="utf-8")
    return rates


async def quickstart(
    folder: Path, seed: int, steps: int, console: Console, engines: EngineOptions
) -> tuple[Rates, Rates, TrainReport]:
    """Train one policy, and print its success before and after. Run again in the same folder, it resumes."""
    desk, transcripts = Desk(folder / "desk.db"), Transcripts()
    train, test = desk.requests("train", TRAIN_REQUESTS, seed), desk.requests("test", TEST_REQUESTS)
    model = TrainableModel(name=f"order-desk-{seed}", project="quickstart", base_model="tiny")
    await model.register(LocalBackend(dir=folder / "server", engine=engines.engine, loader=engines.loader))
    agent = trainable_agent(desk, model)
    before = await rates_before(folder / f"before-{seed}.json", agent, test, transcripts)
    console.print(rates_line("before", before), highlight=False)
    report = await agent.atrain(
        train,
        steps=steps,
        group_size=GROUP_SIZE,
        scenarios_per_step=SCENARIOS_PER_STEP,
        concurrency=GROUP_SIZE * SCENARIOS_PER_STEP,
        config=partial(schedule, steps=steps),
        seed=seed,
    )
    after = await evaluate(agent, test, transcripts)
    if (learned := transcripts.learned()) is not None:
        console.print(
            "\nbefore", conversation(learned[0]), "\nafter", conversation(learned[1]), sep="\n", highlight=False
        )
    console.print(f"\n{rates_line('before', before)}\n{rates_line('after', after)}", highlight=False)
    if report.step < STEPS:
        console.print(f"step {report.step} of the usual {STEPS}: too early for a gain", highlight=False)
    return before, after, report


def show(report: TrainReport, folder: Path, console: Console) -> None:
    """Write the reward curve, and print where it is, the path of the LoRA, and the commands to try next."""
    if report.rewards:
        write_curve(report.rewards, folder / "rewards.png")
    offbook, where = shlex.quote(shell_command()), f"--dir {shlex.quote(str(folder / 'server'))}"
    lines = [
        "",
        f"curve   {folder / 'rewards.png'}",
        f"LoRA    {report.checkpoint or 'none: no step was applied'}",
        "next    " + f"{offbook} checkpoints {report.model} {where}",
        "        " + f"{offbook} export {report.model} --format peft --output order-desk-lora {where}",
        "        " + f"{offbook} serve --model tiny {where}",
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def main(
    seed: int,
    steps: int | None,
    folder: Path,
    results: Path | None,
    engines: EngineOptions | None = None,
) -> None:
    """Run `offbook quickstart`. `results` is a file to write as JSON. Raises MissingExtraError, ConfigError and BackendError."""
    if Figure is None:
        raise MissingExtraError("matplotlib", "plot")
    console = Terminal()
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    running = quickstart(folder, seed, steps or STEPS, console, engines or EngineOptions())
    before, after, report = asyncio.run(running)
    show(report, folder, console)
    if results is not None:
        written = {
            "seed": seed,
            "success": {"before": before.greedy, "after": after.greedy},
            "sampled": {"before": before.sampled, "after": after.sampled},
            "rewards": report.rewards,
            "seconds": {
                "rollout": [iteration.rollout_seconds for iteration in report.iterations],
                "train": [iteration.train_seconds for iteration in report.iterations],
            },
        }
        results.write_text(json.dumps(written) + "\n", encoding="utf-8")


SPEAKERS = {"user": "you", "assistant": "agent", "tool": "tool"}
"""Role of a message -> its name in a printed conversation."""


class Transcripts(TraceSink):
    """A trace sink that keeps the conversations of greedy evaluations in memory.

    `kept`: (scenario id, step) -> messages and success."""

    name = "transcripts"

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], tuple[list[Message], bool]] = {}

    def groups_finished(self, event: GroupsFinished) -> None:
        """Keep the longest conversation of each evaluated rollout."""
        if event.split != "val":  # training, or an evaluation above temperature 0
            return
        for rollout in event.rollouts:
            longest = next(iter(conversations(rollout)), None)
            key = str(rollout.record.place.scenario), event.step
            right = bool(rollout.record.metrics.get("success"))
            self.kept[key] = list(longest.messages) if longest is not None else [], right

    def learned(self) -> tuple[list[Message], list[Message]] | None:
        """The conversation on one scenario before and after training: wrong at the first step and right at the last. Of
        several, the longest. None if there is none."""
        if not self.kept:
            return None
        first, last = min(step for _, step in self.kept), max(step for _, step in self.kept)
        pairs = [
            (before, self.kept[scenario, last][0])
            for (scenario, step), (before, right) in self.kept.items()
            if step == first and not right and self.kept.get((scenario, last), ([], False))[1]
        ]
        return max(pairs, key=lambda pair: len(pair[1]), default=None)


def conversation(messages: Sequence[Message]) -> str:
    """A conversation as text, one line per message or tool call."""
    lines: list[str] = []
    for message in messages:
        role = str(message["role"])
        text = str(message.get("content") or "").strip()
        calls: Sequence[Json] = message.get("tool_calls") or []
        parts = [text] if text else []
        for call in calls:
            arguments = ", ".join(f"{name}={value!r}" for name, value in arguments_of(call).items())
            parts.append(f"calls {call['function']['name']}({arguments})")
        lines += [f"  {SPEAKERS.get(role, role):6} {line}" for line in parts]
    return "\n".join(lines)


def arguments_of(call: Json) -> dict[str, Any]:
    """The arguments of a tool call. Text that is no JSON object is returned under an empty name.

    >>> arguments_of({"function": {"name": "ping", "arguments": '{"count": 2}'}})
    {'count': 2}
    >>> arguments_of({"function": {"name": "ping", "arguments": "twice"}})
    {'': 'twice'}
    """
    text = call["function"]["arguments"]
    try:
        parsed = json.loads(text)
    except ValueError:
        return {"": text}
    return cast(dict[str, Any], parsed) if isinstance(parsed, dict) else {"": parsed}


def write_curve(rewards: Sequence[float], path: Path) -> None:
    """Write the mean reward of each step as a PNG chart."""
    make: Any = Figure
    figure = make(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards, color="#2563eb")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title="The order desk, trained on this machine")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
