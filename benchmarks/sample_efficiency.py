"""How much a policy learns from how many rollouts: the defaults, and levers one at a time.

    OMP_NUM_THREADS=1 python benchmarks/sample_efficiency.py --task first_call --seeds 8 --levers baseline rate_x2
    OMP_NUM_THREADS=1 python benchmarks/sample_efficiency.py --task time --seeds 8 --levers baseline rate_x2
    python benchmarks/sample_efficiency.py --render

A run trains one policy from nothing. Its area is the mean over rollouts of the success on held-out requests, sampled at temperature 1
(trapezoids between measurements). `time` trains `tiny-mcp` on the MCP server of that name with `MCPTrainer`, on a server of its own; its
scenarios are those of `mcp_training.py`. A lever and the baseline are compared seed by seed: same requests, same order, same initial LoRA.
Each run that ends is kept in `results/sample_efficiency.json`, and is not run again. `--render` writes the page and the picture.
`--levers trl` runs TRL's GRPOTrainer in the environment of `--trl-python`, for example of `pip install torch==2.13.0 trl==1.16.0 peft`
without triton: with triton and no GPU, TRL's own kernel fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from desk_training import DeskTraining, Training, trl_job
from matplotlib.figure import Figure
from mcp_training import time_case

from offbook import LocalBackend, LoraOptions, TrainableModel, TrainConfig
from offbook.quickstart.run import STEPS, schedule
from offbook.trainer.evaluate import Interval
from offbook_mcp import MCPTrainer
from offbook_mcp.scenarios.scenario import load_scenarios
from offbook_mcp.training.defaults import default_config

RESULTS = Path(__file__).parent / "results" / "sample_efficiency.json"
RATE = 3.3e-3
"""The quickstart's learning rate, constant on the first task."""
BASELINE = "baseline"
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t: the 0.975 quantiles of 1 to 15 degrees of freedom."""
Runs = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Task -> lever -> seed -> curve."""


@dataclass(frozen=True)
class Lever:
    """A change of the baseline, and where it comes from. `config` is applied to the options of each step; `rate` multiplies their
    learning rate. `training` is applied to how the policy is trained."""

    what: str
    source: str
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    training: dict[str, Any] = field(default_factory=dict[str, Any])
    rate: float = 1.0


IMITATES = {"loss": "cross_entropy", "min_reward": 1.0, "minibatches": 8, "kl_coef": 0.0}
"""Options of a step that imitates."""
LEVERS = {
    BASELINE: Lever("the defaults of `TrainConfig` and `LoraOptions`", "GRPO, 2402.03300"),
    "updates_2": Lever("two updates a step: minibatches=2", "PPO, 1707.06347", {"minibatches": 2}),
    "updates_4": Lever("four updates a step: minibatches=4", "PPO, 1707.06347", {"minibatches": 4}),
    "epochs_2": Lever("two passes over the rollouts, clipped: epochs=2", "PPO, 1707.06347", {"epochs": 2}),
    "rate_x2": Lever("twice the learning rate", "-", rate=2.0),
    "rate_x0.5": Lever("half the learning rate", "-", rate=0.5),
    "betas_0.95": Lever("AdamW's betas (0.9, 0.95)", "LLaMA, 2302.13971", {"betas": (0.9, 0.95)}),
    "betas_0.999": Lever("AdamW's betas (0.9, 0.999)", "Adam, 1412.6980", {"betas": (0.9, 0.999)}),
    "no_scale": Lever("advantages not divided: scale_rewards=False", "Dr. GRPO, 2503.20783", {"scale_rewards": False}),
    "batch_scale": Lever(
        "advantages divided by the batch's deviation", "Lite PPO, 2508.08221", training={"batch_scale": True}
    ),
    "dapo": Lever("loss='dapo': mean over the step's tokens, clip higher", "DAPO, 2503.14476", {"loss": "dapo"}),
    "groups_16": Lever("6 requests with 16 rollouts", "-", training={"group_size": 16, "scenarios": 6}),
    "groups_4": Lever("24 requests with 4 rollouts", "-", training={"group_size": 4, "scenarios": 24}),
    "half_first": Lever(
        "3 rollouts of 24 requests, then 2 more of the 12 nearest to half",
        "after DAPO's dynamic sampling, 2503.14476",
        training={"probes": 3, "group_size": 8},
    ),
    "revisits_4": Lever(
        "4 of 12 requests seen before, nearest to half",
        "after prioritized level replay, 2010.03934",
        training={"revisits": 4},
    ),
    "revisits_4_epochs_2": Lever("both", "-", {"epochs": 2}, training={"revisits": 4}),
    "imitation": Lever(
        "imitate rollouts with reward 1, and 48 of earlier steps: loss='cross_entropy', 8 minibatches, 0.75 of the rate",
        "self-imitation, 1806.05635; ReST-EM, 2312.06585",
        IMITATES,
        training={"replayed": 48},
        rate=0.75,
    ),
    "imitation_stop": Lever(
        "imitation, and no more than 4 rollouts of a request if these are right",
        "-",
        IMITATES,
        training={"replayed": 48, "first": 4, "stopped": "right"},
        rate=0.75,
    ),
    "stop_equal": Lever(
        "no more than 4 rollouts of a request if these are equal", "-", training={"first": 4, "stopped": "equal"}
    ),
    "replay_groups": Lever(
        "4 groups of earlier steps again, at most half right, with truncated importance weights",
        "ACER, 1611.01224",
        training={"replayed_groups": 4},
    ),
    "entropy_0.02": Lever(
        "reward + 0.02 per nat of surprisal, if the group differs",
        "maximum-entropy RL, 1702.08165",
        training={"entropy": 0.02},
    ),
    "temperature_1.2": Lever("rollouts at temperature 1.2", "-", training={"temperature": 1.2}),
    "kl_0.1": Lever("a KL term to the base: kl_coef=0.1", "GRPO, 2402.03300", {"kl_coef": 0.1}),
    "rank_32": Lever("LoRA r=32, alpha=64", "LoRA, 2106.09685", training={"lora": LoraOptions(r=32, alpha=64)}),
    "alpha_32": Lever("LoRA alpha=32", "LoRA, 2106.09685", training={"lora": LoraOptions(alpha=32)}),
    "groups_4_epochs_2": Lever(
        "24 requests with 4 rollouts, two passes",
        "-",
        {"epochs": 2},
        training={"group_size": 4, "scenarios": 24},
    ),
    "a_x4": Lever("LoRA's initial A four times larger", "after LoRA+, 2402.12354", training={"a_scale": 4.0}),
}
"""Name on the command line -> what it changes."""
EQUAL_BY_FORMULA = (
    "Leave-one-out baseline (RLOO, 2402.14740): with groups of equal size G it multiplies every advantage by G / (G - 1). AdamW divides the "
    "gradient by its own size, so without a KL term the update stays the same. With one, the factor weighs the rewards a little more."
)


@dataclass(frozen=True)
class Task:
    """A task: its steps, how often it is measured, the options of the baseline's steps, and of a step its groups."""

    title: str
    steps: int
    every: int
    config: Callable[[int], TrainConfig]
    scenarios: int = 12


def _mcp_config(step: int, steps: int) -> TrainConfig:
    """The options of a step of the default schedule on an MCP server."""
    config = default_config("tiny-mcp", steps)
    return config if isinstance(config, TrainConfig) else config(step)


TASKS = {
    "first_call": Task("The order desk's first call", 24, 6, lambda step: TrainConfig(learning_rate=RATE)),
    "quickstart": Task("The quickstart as a whole", STEPS, 6, partial(schedule, steps=STEPS)),
    "time": Task("The MCP server `time`", 10, 5, partial(_mcp_config, steps=20), scenarios=8),
}


def changed(task: Task, lever: Lever) -> Training:
    """The baseline of a task with a lever applied."""

    def config(step: int) -> TrainConfig:
        options = task.config(step)
        return options.model_copy(update={**lever.config, "learning_rate": options.learning_rate * lever.rate})

    return replace(Training(config, scenarios=task.scenarios), **lever.training)


@cache
def before(task: str) -> float:
    """Held-out success of the untrained policy: one sample of 120 requests for all runs of this process."""
    with tempfile.TemporaryDirectory() as folder:
        training = DeskTraining(
            changed(TASKS[task], LEVERS[BASELINE]), 0, Path(folder), first_call=task == "first_call"
        )
        torch.manual_seed(0)
        rate = training.held_out(1.0)
        training.close()
    return rate


def measured(task: str, lever: str, seed: int) -> dict[str, Any]:
    """Train one policy; its curve."""
    torch.set_num_threads(1)
    about, first_call = TASKS[task], task == "first_call"
    curve: dict[str, Any] = {"rollouts": [0], "held_out": [before(task)], "train": []}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        training = DeskTraining(changed(about, LEVERS[lever]), seed, Path(folder), first_call=first_call)
        size = 8 * about.scenarios
        while training.rollouts < about.steps * size:
            measurements = training.rollouts // (about.every * size)
            curve["train"].append(round(training.step(), 4))
            if training.rollouts // (about.every * size) > measurements:
                curve["rollouts"].append(training.rollouts)
                curve["held_out"].append(round(training.held_out(1.0), 4))
        curve |= {"greedy": round(training.held_out(0.0), 4), "taught": [round(share, 3) for share in training.taught]}
        training.close()
    return curve


def measured_time(task: str, lever: str, seed: int) -> dict[str, Any]:
    """The same on the MCP server `time`: `MCPTrainer` on a server of its own. Each held-out scenario is sampled 8 times."""
    if LEVERS[lever].training.keys() - {"replayed", "group_size", "temperature", "lora"}:
        raise SystemExit(f"--levers {lever}: not for the task time, whose rollouts an MCPTrainer draws")
    return asyncio.run(_measured_time(changed(TASKS[task], LEVERS[lever]), TASKS[task], seed))


async def _measured_time(training: Training, about: Task, seed: int) -> dict[str, Any]:
    curve: dict[str, Any] = {"rollouts": [], "held_out": [], "train": []}
    with tempfile.TemporaryDirectory() as folder:
        backend = LocalBackend(Path(folder), threads=1)
        lora = training.lora.model_copy(update={"seed": seed})
        trainer = MCPTrainer(
            time_case(Path(folder)).target,
            TrainableModel("time", base_model="tiny-mcp", backend=backend, lora=lora),
            load_scenarios(RESULTS.parent / "mcp" / "time.jsonl"),
            seed=seed,
            concurrency=16,
            group_size=training.group_size,
            scenarios_per_step=training.scenarios,
            temperature=training.temperature,
            replayed=training.replayed,
            config=training.config,
        )
        try:
            for step in range(0, about.steps + 1, about.every):
                if step:
                    report = await trainer.atrain_unmeasured(step)
                    curve["train"] += [round(each.success or 0.0, 4) for each in report.iterations]
                curve["rollouts"].append(
                    len(curve["train"]) * trainer.options.group_size * trainer.options.scenarios_per_step
                )
                measured = await trainer.aevaluate(temperature=1.0, rollouts=8)
                curve["held_out"].append(round(measured.success or 0.0, 4))
            curve["greedy"] = round((await trainer.aevaluate()).success or 0.0, 4)
        finally:
            await asyncio.to_thread(backend.close)
    return curve


def measured_trl(task: str, seed: int, python: str) -> dict[str, Any]:
    """The same by TRL's GRPOTrainer, in another environment. Its held-out requests are sampled there too."""
    about = TASKS[task]
    if task != "first_call":
        raise SystemExit("--levers trl: only the task first_call has no tools to run between calls")
    with tempfile.TemporaryDirectory() as folder:
        job = trl_job(seed, about.steps, Path(folder)) | {"every": about.every, "learning_rate": RATE}
        script = Path(__file__).parent / "sample_efficiency_trl.py"
        asked = subprocess.run([python, str(script)], input=json.dumps(job), capture_output=True, text=True)
        if asked.returncode:
            raise RuntimeError(f"TRL ended with {asked.returncode}: {asked.stderr[-2000:]}")
    curve = json.loads(asked.stdout)
    return curve | {"rollouts": [0, *curve["rollouts"]], "held_out": [before(task), *curve["held_out"]]}


def area(curve: dict[str, Any], end: int | None = None) -> float:
    """The mean of the held-out success over the first `end` rollouts, or all, between measurements linear.

    >>> area({"rollouts": [0, 10, 20], "held_out": [0.0, 0.5, 0.5]})
    0.375
    >>> area({"rollouts": [0, 10, 20], "held_out": [0.0, 0.5, 0.5]}, 10)
    0.25
    """
    last = curve["rollouts"][-1] if end is None else end
    rollouts = [*(number for number in curve["rollouts"] if number < last), last]
    points = pairwise(zip(rollouts, np.interp(rollouts, curve["rollouts"], curve["held_out"]), strict=True))
    return float(sum((b - a) * (y + z) / 2 for (a, y), (b, z) in points) / last)


def ratio(values: dict[str, float], baseline: dict[str, float]) -> Interval:
    """The mean area of a lever over the baseline's mean on the same seeds, with Fieller's 95 % interval for the ratio of two
    paired means (Fieller 1954). A bootstrap over so few seeds would be too narrow.

    >>> found = ratio({"0": 3.0, "1": 4.0, "2": 5.5, "3": 4.5}, {"0": 2.0, "1": 2.2, "2": 2.1, "3": 1.9})
    >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3)
    (2.073, 1.271, 2.897)
    """
    if values == baseline:
        return Interval(1.0, 1.0, 1.0)
    seeds = sorted(values.keys() & baseline.keys())
    over, under = np.array([(values[seed], baseline[seed]) for seed in seeds]).T
    top, bottom = over.mean(), under.mean()
    if len(seeds) < 2:  # one pair has no spread
        return Interval(float(top / bottom), -np.inf, np.inf)
    t2 = T[min(len(seeds) - 1, len(T)) - 1] ** 2 / len(seeds)
    (a, c), (_, b) = np.cov(over, under)
    a, b, c = top**2 - t2 * a, bottom**2 - t2 * b, top * bottom - t2 * c
    if b <= 0:
        return Interval(float(top / bottom), -np.inf, np.inf)
    root = max(c**2 - a * b, 0.0) ** 0.5
    return Interval(float(top / bottom), float((c - root) / b), float((c + root) / b))


def verdict(interval: Interval) -> str:
    """What an interval of a ratio says."""
    return "better" if interval.low > 1 else "worse" if interval.high < 1 else "undecided"


def areas(runs: dict[str, dict[str, Any]], end: int | None = None) -> dict[str, float]:
    """Seed -> area over the rollouts up to `end`."""
    return {seed: area(curve, end) for seed, curve in runs.items()}


def levelled(results: Runs) -> Runs:
    """The runs, whose curves on the order desk begin with one value: each process measured the same untrained policy once, and
    that noise would be shared by both sides of a pair."""
    for task in ("first_call", "quickstart"):
        curves = [curve for runs in results.get(task, {}).values() for curve in runs.values()]
        untrained = fmean({curve["held_out"][0] for curve in curves}) if curves else 0.0
        for curve in curves:
            curve["held_out"][0] = untrained
    return results


def task_rows(levers: dict[str, dict[str, Any]], end: int) -> Iterator[str]:
    """The rows of a task's table, the best lever first. `end`: rollouts of a run."""
    baseline = areas(levers[BASELINE], end)
    ordered = sorted(levers, key=lambda name: -ratio(areas(levers[name], end), baseline).mean)
    for name in ordered:
        runs = levers[name]
        about = LEVERS.get(name, Lever("TRL's GRPOTrainer, the same data, LoRA and rate", "TRL"))
        against, same = ratio(areas(runs, end), baseline), fmean(baseline[seed] for seed in runs)
        cells = [
            name,
            about.what,
            about.source,
            str(len(runs)),
            f"{fmean(areas(runs, end).values()):.3f}",
            f"{same:.3f}",
        ]
        cells.append(f"{fmean(curve['held_out'][-1] for curve in runs.values()):.2f}")
        cells.append(f"{fmean(curve['greedy'] for curve in runs.values()):.2f}")
        if name == BASELINE:
            cells += ["1", "-"]
        else:
            cells += [f"{against.mean:.2f} ({against.low:.2f} to {against.high:.2f})", verdict(against)]
        yield "| " + " | ".join(cells) + " |"


def against_trl(levers: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The baseline and the best lever of at least as many seeds over TRL's mean area, paired by seed."""
    other = areas(levers["trl"])
    known = [name for name, runs in levers.items() if other.keys() <= runs.keys() and name not in ("trl", BASELINE)]
    best = sorted(known, key=lambda name: -ratio(areas(levers[name]), other).mean)[:1]
    [version] = {curve["version"] for curve in levers["trl"].values()}
    for name in (BASELINE, *best):
        found = ratio(areas(levers[name]), other)
        yield (
            f"- `{name}` over TRL {version}, {len(other)} seeds: {found.mean:.2f} ({found.low:.2f} to {found.high:.2f})."
        )


def commands(results: Runs) -> Iterator[str]:
    """The words of the commands that measured all this: one for the levers of a task with as many seeds."""
    for task, levers in results.items():
        for seeds in sorted({len(runs) for runs in levers.values()}, reverse=True):
            names = " ".join(name for name, runs in levers.items() if len(runs) == seeds)
            place = " --trl-python PYTHON" if "trl" in names.split() else ""
            yield f"--task {task} --seeds {seeds} --levers {names}{place}"


def page(results: Runs) -> str:
    """The page of all that was measured."""
    lines = [
        "# Learning from few rollouts",
        "",
        *(f"    OMP_NUM_THREADS=1 python benchmarks/sample_efficiency.py {words}" for words in commands(results)),
        "    python benchmarks/sample_efficiency.py --render",
        "",
        "Which options make the bundled policy `tiny` learn more from the same number of rollouts? A run's **area** is the mean, over",
        "rollouts, of its success on 120 held-out requests, sampled at temperature 1. The ratio is a lever's mean area over the",
        "baseline's on the same seeds, with Fieller's 95 % interval for the ratio of two paired means. *Last* is the success at the",
        "end, sampled, and *greedy* that of the likeliest answers.",
        "",
        "`time` trains `tiny-mcp` with `MCPTrainer`; its 10 held-out scenarios are sampled 8 times each. The runs take the first ten",
        "steps of the schedule for 20, with 18 scenarios to train on. The interval is one over seeds, for these ten scenarios.",
        "",
        "A lever is *better* or *worse* if the whole interval lies above or below 1. Many levers are compared, so one in forty is",
        "*better* by chance. On the order desk sampler and learner run in one process, without HTTP and LangGraph. There every curve",
        "begins with one value, the mean of all measurements of the untrained policy. The last list names the lever that is best",
        "against TRL of those with as many seeds.",
    ]
    for name, task in TASKS.items():
        lines += ["", f"## {task.title}", ""]
        if BASELINE not in results.get(name, {}):
            lines += ["Not measured yet."]
            continue
        steps = f"{task.steps} steps of {8 * task.scenarios} rollouts, measured every {task.every} steps."
        options = (
            f"Learning rate {RATE}, constant; reward 1 for the right first call, else 0."
            if name == "first_call"
            else ""
        )
        lines += [f"{steps} {options}".strip(), ""]
        lines += [
            "| lever | what it changes | source | seeds | area | baseline's, same seeds | last | greedy | ratio | verdict |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        lines += task_rows(results[name], 8 * task.scenarios * task.steps)
        if "trl" in results[name]:
            lines += ["", *against_trl(results[name])]
    lines += ["", f"![Held-out success over rollouts]({RESULTS.with_suffix('.png').name})", "", "## Not run", ""]
    lines += [f"- {EQUAL_BY_FORMULA}"]
    missing = [f"`{lever}`" for lever in LEVERS if lever not in results.get("first_call", {})]
    if missing:
        lines += [f"- Not measured yet on the first task: {', '.join(missing)}."]
    lines += [
        "- DAPO's groups without signal that are topped up until all have one: a step then has no fixed number of rollouts.",
        "- Adam without its bias correction.",
        "- Scenarios drawn by what can be learned: a run of this length sees each of the 600 requests less than twice, so their",
        "  success cannot be estimated. `half_first` chooses within a step instead.",
        "- Other combinations of levers.",
        "",
    ]
    return "\n".join(lines)


def draw(results: Runs, file: Path) -> None:
    """The mean held-out success of each lever of the first task over rollouts. Those that are not better are grey."""
    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    levers = results["first_call"]
    baseline = areas(levers[BASELINE])
    better = [name for name in levers if verdict(ratio(areas(levers[name]), baseline)) == "better"]
    named = sorted([*better, BASELINE, "trl"], key=lambda name: -fmean(areas(levers[name]).values()))
    others = [name for name in levers if name not in named]
    for name in [*others, *named]:
        runs = list(levers[name].values())
        rates = zip(*(curve["held_out"] for curve in runs), strict=True)
        label = name if name in named else f"{len(others)} others" if name == others[0] else None
        grey = {} if name in named else {"color": "0.8", "linewidth": 0.8}
        axes.plot(
            runs[0]["rollouts"], [fmean(column) for column in rates], marker="o", markersize=3, label=label, **grey
        )
    axes.set(xlabel="rollouts", ylabel="held-out success, sampled", title=TASKS["first_call"].title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)


def write(results: Runs) -> None:
    """Keep what was measured; the file is replaced as a whole."""
    part = RESULTS.with_suffix(".part")
    part.write_text(
        json.dumps(results, indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n", encoding="utf-8"
    )
    os.replace(part, RESULTS)


def main() -> None:
    """Run what is missing, lever by lever, or render what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="first_call")
    parser.add_argument("--levers", nargs="+", choices=[*LEVERS, "trl"], default=list(LEVERS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2, help="policies trained at the same time")
    parser.add_argument("--trl-python", default=sys.executable, help="the Python that has TRL")
    parser.add_argument("--render", action="store_true", help="write the page and the picture, and run nothing")
    known = parser.parse_args()
    results: Runs = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if known.render:
        results = levelled(results)
        RESULTS.with_suffix(".md").write_text(page(results), encoding="utf-8")
        draw(results, RESULTS.with_suffix(".png"))
        return
    kept = results.setdefault(known.task, {})
    missing = [
        (lever, seed) for seed in range(known.seeds) for lever in known.levers if str(seed) not in kept.get(lever, {})
    ]
    with ProcessPoolExecutor(known.jobs, get_context("fork")) as pool:
        futures = {
            pool.submit(measured_trl, known.task, seed, known.trl_python)
            if lever == "trl"
            else pool.submit(measured_time if known.task == "time" else measured, known.task, lever, seed): (
                lever,
                seed,
            )
            for lever, seed in missing
        }
        failed = 0
        for future in as_completed(futures):
            lever, seed = futures[future]
            try:
                curve = future.result()
            except Exception as error:  # noqa: BLE001  # the other runs go on
                failed += 1
                print(f"{lever} seed {seed} failed: {error!r}", file=sys.stderr, flush=True)
                continue
            kept.setdefault(lever, {})[str(seed)] = curve
            write(results)
            print(f"{lever} seed {seed}: area {area(curve):.3f}, {curve['held_out']}", flush=True)
    if failed:
        raise SystemExit(f"{failed} of {len(missing)} runs failed: start the command again to repeat them")


if __name__ == "__main__":
    main()
