"""The quickstart trained by its reward, and through RULER by a noisy judge: `python benchmarks/ruler_quickstart.py`.

The judge stands behind real HTTP. It knows the right answers, compares every two attempts of a group, gets 10 % of the
comparisons that have a winner wrong, and scores an attempt by its share of comparisons won (a draw is half). 5 % of its
answers are malformed: prose, cut off, an entry short, a score of NaN. Writes benchmarks/results/ruler.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from langchain_core.messages import convert_to_messages
from rich.console import Console

from offbook import LocalBackend, Ruler, TrainableModel
from offbook.quickstart.desk import Desk, Request, reward
from offbook.quickstart.run import (
    GROUP_SIZE,
    SCENARIOS_PER_STEP,
    STEPS,
    TEST_REQUESTS,
    TRAIN_REQUESTS,
    Rates,
    Transcripts,
    evaluate,
    schedule,
    trainable_agent,
)
from offbook.testing import LlmReply, LlmRequest, ShownConversation, attempts_shown, says, scripted_llm

SWAPPED, MALFORMED = 0.10, 0.05
NEEDED = 0.85
RESULTS = Path(__file__).parent / "results" / "ruler.md"
FAULTS = ("prose", "cut", "short", "nan")


@dataclass
class NoisyJudge:
    """`counts`: answers, malformed ones, comparisons with a winner, and those that were swapped."""

    requests: dict[str, Request]
    seed: int
    counts: Counter[str] = field(default_factory=Counter)

    def __call__(self, request: LlmRequest) -> LlmReply:
        self.counts["answers"] += 1
        draw = random.Random(f"{self.seed} {self.counts['answers']} {request.messages[1]['content']}")
        shown = attempts_shown(request.messages)
        truth = {name: self._truth(each[0]) for name, each in shown.items()}
        scores = [{"id": name, "explanation": "", "score": score} for name, score in self._scores(truth, draw).items()]
        if draw.random() >= MALFORMED:
            return says(json.dumps({"scores": scores}))
        self.counts["malformed"] += 1
        return malformed(draw.choice(FAULTS), scores)

    def _truth(self, conversation: ShownConversation) -> float:
        """The reward of an attempt, by the request that its user message makes."""
        question = next(str(each["content"]) for each in conversation.messages if each["role"] == "user")
        return reward(self.requests[question], list(convert_to_messages(conversation.messages)))["reward"]

    def _scores(self, truth: dict[str, float], draw: random.Random) -> dict[str, float]:
        """The share of comparisons that each attempt wins."""
        won = dict.fromkeys(truth, 0.0)
        for one, other in combinations(truth, 2):
            if truth[one] == truth[other]:
                won[one] += 0.5
                won[other] += 0.5
                continue
            winner, loser = (one, other) if truth[one] > truth[other] else (other, one)
            swapped = draw.random() < SWAPPED
            self.counts.update(compared=1, swapped=int(swapped))
            won[loser if swapped else winner] += 1
        return {name: wins / (len(truth) - 1) if len(truth) > 1 else truth[name] for name, wins in won.items()}


def malformed(fault: str, scores: list[dict[str, Any]]) -> LlmReply:
    """An answer that cannot be used."""
    whole = json.dumps({"scores": scores})
    broken = {
        "prose": "I would put the second attempt first, then the others.",
        "cut": whole[: len(whole) // 2],
        "short": json.dumps({"scores": scores[1:]}),
        "nan": json.dumps({"scores": [{**scores[0], "score": float("nan")}, *scores[1:]]}),
    }
    return says(broken[fault])


@dataclass(frozen=True)
class Outcome:
    """What a run reached. `dropped`: share of groups that the judge gave no scores."""

    before: Rates
    after: Rates
    seconds: float
    dropped: float = 0.0
    judge: dict[str, int] = field(default_factory=dict)


async def run(folder: Path, seed: int, steps: int, by_ruler: bool, threads: int | None) -> Outcome:
    """One training of the quickstart's agent on its requests; rates are by its reward in either case."""
    desk, transcripts = Desk(folder / "desk.db"), Transcripts()
    train, test = desk.requests("train", TRAIN_REQUESTS, seed), desk.requests("test", TEST_REQUESTS)
    model = TrainableModel(name="order-desk", project="ruler", base_model="tiny")
    backend = LocalBackend(dir=folder / "server", threads=threads)
    await model.register(backend)
    agent = trainable_agent(desk, model)
    judge = NoisyJudge({request.question: request for request in train}, seed)
    try:
        before, began = await evaluate(agent, test, transcripts), time.monotonic()
        options: dict[str, Any] = {"config": partial(schedule, steps=steps), "seed": seed}
        sizes = {"group_size": GROUP_SIZE, "scenarios_per_step": SCENARIOS_PER_STEP}
        with scripted_llm(judge) as endpoint:
            if by_ruler:
                options["judge"] = Ruler("openai/noisy", api_base=endpoint.url, api_key="unused", cache=None)
            report = await agent.atrain(
                train, steps=steps, concurrency=GROUP_SIZE * SCENARIOS_PER_STEP, **sizes, **options
            )
        seconds = time.monotonic() - began
        dropped = [iteration.metrics.get("judge/dropped", 0.0) for iteration in report.iterations]
        after = await evaluate(agent, test, transcripts)
    finally:
        backend.close()
    return Outcome(before, after, seconds, sum(dropped) / max(len(dropped), 1), dict(judge.counts))


def page(rows: list[tuple[int, Outcome, Outcome]], steps: int) -> str:
    """The table, and whether RULER reached its share."""
    lines = [
        "# The quickstart by its reward and through RULER",
        "",
        f"{steps} steps of {SCENARIOS_PER_STEP} groups of {GROUP_SIZE}; success on {TEST_REQUESTS} held-out requests, greedy",
        f"and sampled. The judge gets {SWAPPED:.0%} of its comparisons wrong, and {MALFORMED:.0%} of its answers are malformed.",
        "Made by `python benchmarks/ruler_quickstart.py`.",
        "",
        "| seed | before | by reward | through RULER | RULER / reward (sampled) | comparisons swapped | malformed | groups dropped | s by reward | s through RULER |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for seed, own, judged in rows:
        counts = judged.judge
        lines.append(
            f"| {seed} | {both(own.before)} | {both(own.after)} | {both(judged.after)} | "
            f"{share(own, judged):.2f} | {counts['swapped'] / max(counts['compared'], 1):.1%} | "
            f"{counts.get('malformed', 0) / counts['answers']:.1%} | {judged.dropped:.1%} | {own.seconds:.0f} | {judged.seconds:.0f} |"
        )
    mean = sum(share(own, judged) for _, own, judged in rows) / len(rows)
    verdict = "reached" if mean >= NEEDED else "NOT reached"
    return "\n".join([*lines, "", f"Mean share {mean:.2f}; {NEEDED} {verdict}."]) + "\n"


def both(rates: Rates) -> str:
    return f"{rates.greedy:.0%} / {rates.sampled:.0%}"


def share(own: Outcome, judged: Outcome) -> float:
    """RULER's part of the success that the reward reaches, sampled."""
    return judged.after.sampled / own.after.sampled if own.after.sampled else float("nan")


def main() -> None:
    """Runs every seed twice, prints the page and keeps it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, help="of sampler and learner each; 1 where other work runs beside")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    console, rows = Console(), list[tuple[int, Outcome, Outcome]]()
    for seed in options.seeds:
        outcomes: list[Outcome] = []
        for by_ruler in (False, True):
            with tempfile.TemporaryDirectory(prefix="ruler-quickstart-") as folder:
                outcomes.append(asyncio.run(run(Path(folder), seed, options.steps, by_ruler, options.threads)))
            console.print(f"seed {seed}, {'RULER' if by_ruler else 'reward'}: {outcomes[-1]}", highlight=False)
        rows.append((seed, outcomes[0], outcomes[1]))
        options.results.write_text(page(rows, options.steps), encoding="utf-8")
    print(page(rows, options.steps))


if __name__ == "__main__":
    main()
