"""The quickstart's order desk, learned by GRPO alone, and by GRPO after supervised training.

    python benchmarks/supervised.py --seeds 0 1 2 --picture curves.png

Supervised training imitates 200 runs of the app on a scripted expert that is right in 60 % of them, kept by their reward. Both
ways are measured on the held-out requests, greedy, every few steps of GRPO, until 90 % of them are right. Started again with the
same folder, it goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from matplotlib.figure import Figure
from pydantic import SecretStr

from offbook import LocalBackend, SFTConfig, TrainableModel, TrainConfig, Trajectory
from offbook.quickstart.desk import TOOLS, Desk, Request, reward
from offbook.quickstart.run import (
    GROUP_SIZE,
    SCENARIOS_PER_STEP,
    STEPS,
    TEST_REQUESTS,
    TRAIN_REQUESTS,
    schedule,
    trainable_agent,
)
from offbook.testing import LlmReply, LlmRequest, calls_tool, says, scripted_llm
from offbook_langgraph import observe

DEMONSTRATIONS, RIGHT = 200, 0.6
REACHED = 0.9
RATE_AFTER_SFT = 0.1
"""Of GRPO's learning rate, where it goes on from supervised training."""
SUPERVISED = SFTConfig(epochs=8, batch_size=4, learning_rate=3e-3)


@dataclass
class Expert:
    """Answers the desk's requests; `RIGHT` of them as they should be, the others from a tool that was not asked for."""

    desk: Desk
    requests: dict[str, Request]
    seed: int

    def __call__(self, request: LlmRequest) -> LlmReply:
        question = next(each["content"] for each in request.messages if each["role"] == "user")
        results = [json.loads(each["content"]) for each in request.messages if each["role"] == "tool"]
        wanted, tools = self.requests[question], self._tools(question)
        if len(results) < len(tools):
            key = str(next(iter(results[-1].values()))) if results else wanted.order
            name = tools[len(results)]
            return calls_tool(name, {name.split("_")[0]: key}, call_id=f"call-{len(results)}")
        column, value = next(iter(results[-1].items()))
        return says(f"The {column} is {value}.")

    def _tools(self, question: str) -> list[str]:
        """The tools that are called, in order."""
        draw, wanted = random.Random(f"expert {self.seed} {question}"), self.requests[question].tool
        right = ["order_customer", wanted] if wanted == "customer_phone" else [wanted]
        others = [name for name in TOOLS if name.startswith("order_") and name != wanted]
        return right if draw.random() < RIGHT else [draw.choice(others)]


async def demonstrations(desk: Desk, requests: Sequence[Request], seed: int) -> list[Trajectory]:
    """The app's runs on the expert in place of its model, observed and scored."""
    with scripted_llm(Expert(desk, {request.question: request for request in requests}, seed)) as endpoint:
        own = ChatOpenAI(model="expert", base_url=endpoint.url, api_key=SecretStr("unused"))
        app: Any = create_agent(own, desk.tools())
        runs: list[Trajectory] = []
        for request in requests:
            with observe() as run:
                state = await app.ainvoke({"messages": [("user", request.question)]})
            run.reward = reward(request, state["messages"])["reward"]
            runs.append(run)
    return runs


@dataclass
class Way:
    """One way of one seed: a model, the options of its steps, and what was measured. `rows` are kept in `file`."""

    name: str
    seed: int
    agent: Any
    desk: Desk
    file: Path
    about: dict[str, Any]

    def __post_init__(self) -> None:
        kept: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
        self.rows: list[dict[str, Any]] = kept.get(self.name, {}).get("rows", [])
        self.about = {**kept.get(self.name, {}).get("about", {}), **self.about}

    async def measure(self, step: int, **row: Any) -> float:
        """Held-out success of the newest step, kept with the number of steps of GRPO before it."""
        known = next((each for each in self.rows if each["step"] == step), None)
        if known is None:
            test = self.desk.requests("test", TEST_REQUESTS)
            found = await self.agent.aevaluate(test, temperature=0.0, concurrency=64, timeout=600)
            known = {"step": step, "held_out": found.success, **row}
            self.rows.append(known)
            kept: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
            kept[self.name] = {"about": self.about, "rows": self.rows}
            self.file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        return known["held_out"]

    async def train(self, config: Callable[[int], TrainConfig], every: int) -> None:
        """Train on rollouts, and measure every few steps, until `REACHED` of the held-out requests are right."""
        first = await self.agent.own_models()[0].get_step() if not self.rows else self.rows[0]["first"]
        if await self.measure(0, first=first) >= REACHED:
            return
        for step in range(every, STEPS + 1, every):
            report = await self.agent.atrain(
                self.desk.requests("train", TRAIN_REQUESTS, self.seed),
                steps=first + step,
                group_size=GROUP_SIZE,
                scenarios_per_step=SCENARIOS_PER_STEP,
                concurrency=GROUP_SIZE * SCENARIOS_PER_STEP,
                config=lambda number: config(number - first),
                seed=self.seed,
            )
            if await self.measure(step, sampled=[each.success for each in report.iterations]) >= REACHED:
                return


def after_sft(step: int, rate: float) -> TrainConfig:
    """The quickstart's options of a step at the part `rate` of its rate, which would undo what was imitated, and so would the KL to
    the base."""
    config = schedule(step, STEPS)
    return config.model_copy(update={"learning_rate": config.learning_rate * rate, "kl_coef": 0.0})


async def measure(folder: Path, seeds: Sequence[int], every: int, file: Path, ways: Sequence[str], rate: float) -> None:
    """All ways of each seed; what is in the file is not measured again."""
    folder.mkdir(parents=True, exist_ok=True)
    desk, backend = Desk(folder / "desk.db"), LocalBackend(dir=folder / "server", engine="embedded", threads=1)

    def way(kind: str, seed: int, **about: Any) -> tuple[Way, TrainableModel]:
        model = TrainableModel(name=f"{kind}-{seed}", project="warm-start", base_model="tiny", backend=backend)
        about |= {"kind": kind, "seed": seed}
        return Way(f"{kind}-{seed}", seed, trainable_agent(desk, model), desk, file, about), model

    warm: list[Way] = []
    for seed in seeds if "sft" in ways else ():
        runs = await demonstrations(desk, desk.requests("train", TRAIN_REQUESTS, seed)[:DEMONSTRATIONS], seed)
        kept = [run for run in runs if run.reward == 1]
        sft, model = way("sft", seed, demonstrations=len(runs), kept=len(kept))
        result = await model.train_sft(kept, SUPERVISED, request_id=f"warm-start-{seed}")
        await sft.measure(0, first=result.step, loss=result.loss)
        warm.append(sft)
    for sft in warm:
        await sft.train(partial(after_sft, rate=rate), every)
    for seed in seeds if "grpo" in ways else ():
        plain, _ = way("grpo", seed)
        await plain.train(partial(schedule, steps=STEPS), every)


def draw(rows: dict[str, Any], file: Path) -> None:
    """Draw the held-out success of each way and seed over the steps of GRPO."""
    figure: Any = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, way in sorted(rows.items()):
        steps, rates = ([row[key] for row in way["rows"]] for key in ("step", "held_out"))
        after = name.startswith("sft")
        axes.plot(
            steps, rates, "-" if after else "--", marker="o", markersize=3, label=name.replace("sft", "sft + grpo")
        )
    axes.axhline(REACHED, color="gray", linewidth=0.8)
    axes.set(xlabel="steps of GRPO", ylabel="held-out success, greedy", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    """Run the comparison, and write its rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=3, help="steps between measurements")
    parser.add_argument("--ways", nargs="+", default=["sft", "grpo"], choices=["sft", "grpo"])
    parser.add_argument("--rate", type=float, default=RATE_AFTER_SFT, help="of GRPO's learning rate, after SFT")
    parser.add_argument("--folder", type=Path, default=Path("supervised-run"))
    parser.add_argument("--json", type=Path, default=Path("supervised.json"), help="where the rows are written")
    parser.add_argument("--picture", type=Path, help="where the curves are drawn")
    known = parser.parse_args()
    asyncio.run(measure(known.folder, known.seeds, known.every, known.json, known.ways, known.rate))
    if known.picture is not None:
        draw(json.loads(known.json.read_text(encoding="utf-8")), known.picture)


if __name__ == "__main__":
    main()
