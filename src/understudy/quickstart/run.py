"""The quickstart: evaluate an agent, train it, evaluate it again, and show what changed. Read it from the bottom up."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (create_agent leaves its context's type open)

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from rich.console import Console

from understudy.client.local import LocalBackend
from understudy.client.model import TrainableModel
from understudy.config import EngineOptions, TrainConfig
from understudy.quickstart.desk import Desk, Request, reward
from understudy.quickstart.story import Transcripts, conversation, print_curve, require_plots, write_curve
from understudy.trainer.report import TrainReport
from understudy_langgraph import trainable
from understudy_langgraph.trainable import TrainableRunnable

TRAIN_REQUESTS, TEST_REQUESTS = 600, 120
GROUP_SIZE, SCENARIOS_PER_STEP = 8, 12
STEPS = 36


@dataclass(frozen=True)
class Rates:
    """Success on the held-out requests: at temperature 0, and at temperature 1."""

    greedy: float
    sampled: float


def trainable_agent(desk: Desk, model: TrainableModel) -> TrainableRunnable:
    """An ordinary LangGraph agent, and the line that makes it trainable."""
    agent = create_agent(
        ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused"), max_completion_tokens=48), desk.tools()
    )

    def score(request: Request, state: dict[str, list[BaseMessage]]) -> dict[str, float]:
        return reward(request, state["messages"])

    return trainable(agent, model=model, reward=score)


def schedule(step: int, steps: int) -> TrainConfig:
    """Both fall in a line: the rate, and the pull towards the base, which keeps all tools in play while little is known."""
    left = 1 - (step - 1) / steps
    return TrainConfig(learning_rate=3.3e-3 * left, kl_coef=0.3 * left, minibatches=4)


async def evaluate(agent: TrainableRunnable, test: Sequence[Request], sink: Transcripts) -> Rates:
    """Both rates with the newest step."""
    rates: list[float] = []
    for temperature in (0.0, 1.0):
        found = await agent.aevaluate(test, temperature=temperature, concurrency=64, timeout=300, sinks=[sink])
        rates.append(found.success or 0.0)
    return Rates(*rates)


def rates_line(when: str, rates: Rates) -> str:
    """`before: ...`"""
    return f"{when}: greedy {rates.greedy:.0%}, sampled {rates.sampled:.0%} of {TEST_REQUESTS} held-out requests right"


async def rates_before(file: Path, agent: TrainableRunnable, test: Sequence[Request], sink: Transcripts) -> Rates:
    """The untrained policy's rates, kept in a file for a run that goes on after an interruption."""
    if file.exists():
        return Rates(**json.loads(file.read_text(encoding="utf-8")))
    rates = await evaluate(agent, test, sink)
    file.write_text(json.dumps(asdict(rates)), encoding="utf-8")
    return rates


async def quickstart(
    folder: Path, seed: int, steps: int, console: Console, engines: EngineOptions
) -> tuple[Rates, Rates, TrainReport]:
    """Train one policy; run again in the same folder, it goes on where it was."""
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
    """The reward curve, the place of the LoRA, and what to try next."""
    if report.rewards:
        print_curve(console, report.rewards)
        write_curve(report.rewards, folder / "rewards.png")
    understudy, where = command(), f"--dir {shlex.quote(str(folder / 'server'))}"
    lines = [
        "",
        f"curve   {folder / 'rewards.png'}",
        f"LoRA    {report.checkpoint or 'none: no step was applied'}",
        "next    " + f"{understudy} checkpoints {report.model} {where}",
        "        " + f"{understudy} export {report.model} --format peft --output order-desk-lora {where}",
        "        " + f"{understudy} serve --model tiny {where}",
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


def command() -> str:
    """`understudy` as the user's shell finds it: by its name, or by its path if its environment is not active."""
    own = Path(sys.executable).with_name("understudy")
    if shutil.which("understudy") == str(own):
        return "understudy"
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def main(
    seed: int, steps: int | None, folder: Path, results: Path | None, engines: EngineOptions | None = None
) -> None:
    """`understudy quickstart`; `results` is written as JSON. Raises MissingExtraError, ConfigError, BackendError."""
    require_plots()
    console = Console()
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    before, after, report = asyncio.run(quickstart(folder, seed, steps or STEPS, console, engines or EngineOptions()))
    show(report, folder, console)
    if results is not None:
        written = {
            "seed": seed,
            "success": {"before": before.greedy, "after": after.greedy},
            "sampled": {"before": before.sampled, "after": after.sampled},
            "rewards": report.rewards,
            "seconds": {
                "rollout": [each.rollout_seconds for each in report.iterations],
                "train": [each.train_seconds for each in report.iterations],
            },
        }
        results.write_text(json.dumps(written) + "\n", encoding="utf-8")
