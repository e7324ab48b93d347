"""A fresh policy learns the order desk from the quickstart's trained policy, beside GRPO: success against rollouts.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py

GRPO trains each seed as the quickstart does. The first seed's policy then scores the students of all seeds, which see no reward. Some of
them imitate it first: their first step is supervised training on rollouts of the teacher. Each run
that ends is kept in `results/distillation.json` and not run again, and `results/distillation.md` is written anew.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from desk_training import DeskTraining, Training

from offbook import TeacherKL, TrainConfig
from offbook.quickstart.run import STEPS, schedule

RESULTS = Path(__file__).parent / "results" / "distillation.json"
REACHED = 0.9
TAUGHT_STEPS = 12
Curve = dict[str, list[float]]
"""`rollouts` and `held_out` of each measurement, `sampled` (success) and `kl` (to the teacher, before it) of each step."""


@dataclass(frozen=True)
class Way:
    """A way to train. `every`: steps between measurements on the held-out requests."""

    title: str
    steps: int
    every: int
    training: Training


def taught(step: int) -> TrainConfig:
    """The quickstart's options of a step, with a teacher in place of rewards and of the KL to the base."""
    own = schedule(step, TAUGHT_STEPS)
    return own.model_copy(update={"kl_coef": 0.0, "distill": TeacherKL(teacher="expert", alone=True)})


def taught_after_imitation(step: int) -> TrainConfig:
    """The same, at a third of the rate, after a step of supervised training on the teacher's rollouts."""
    if step == 1:
        return TrainConfig(loss="cross_entropy", learning_rate=3e-3, epochs=4, minibatches=12)
    own = taught(step - 1)
    return own.model_copy(update={"learning_rate": own.learning_rate / 3})


WAYS = {
    "grpo": Way("GRPO", STEPS, 6, Training(partial(schedule, steps=STEPS))),
    "distillation": Way("distillation", TAUGHT_STEPS, 3, Training(taught, group_size=1, scenarios=48)),
    "imitation": Way(
        "imitation, then distillation",
        TAUGHT_STEPS + 1,
        1,
        Training(taught_after_imitation, group_size=1, scenarios=48),
    ),
}


def trained(name: str, seed: int, teacher: Path) -> Curve:
    """Train one policy. The first seed's GRPO leaves its last checkpoint at `teacher`; GRPO of other seeds ends at `REACHED`."""
    way, makes_teacher = WAYS[name], name == "grpo" and seed == 0
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    curve: Curve = {"rollouts": [], "held_out": [], "sampled": [], "kl": []}
    with tempfile.TemporaryDirectory() as folder:
        options = way.training if name == "grpo" else replace(way.training, teacher=teacher)
        training = DeskTraining(options, seed, Path(folder), first_call=False)
        for step in range(way.steps + 1):
            if step:
                curve["sampled"].append(round(training.step(), 4))
                curve["kl"] += [round(value, 5) for metric, value in training.metrics.items() if metric == "kl/teacher"]
            if step % way.every == 0:
                curve["rollouts"].append(training.rollouts)
                curve["held_out"].append(round(training.held_out(0.0), 4))
                print(f"{name}, seed {seed}, step {step}: {curve['held_out'][-1]:.0%} held out", flush=True)
                if name == "grpo" and not makes_teacher and curve["held_out"][-1] >= REACHED:
                    break
        training.close()
        if makes_teacher:
            shutil.copytree(training.newest, teacher)
    return curve


def until_reached(curve: Curve) -> str:
    """How many rollouts the first measurement at `REACHED` had behind it."""
    points = zip(curve["rollouts"], curve["held_out"], strict=True)
    return next((f"{rollouts:,}" for rollouts, rate in points if rate >= REACHED), "not reached")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown, with an empty line before it."""
    return ["", *("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))]


def page(kept: dict[str, dict[str, Curve]]) -> str:
    """The page of all that was measured."""
    lines = [
        "# Distillation on policy, beside GRPO",
        "",
        "    OMP_NUM_THREADS=1 python benchmarks/distillation.py",
        "",
        "GRPO trains the bundled policy on the quickstart's order desk, with its options: 96 rollouts a step. The policy of seed 0 after",
        f"{STEPS} steps is the teacher. Fresh policies then learn from its probabilities alone, without rewards: {TAUGHT_STEPS} steps of 48 rollouts, each",
        "of another request. With imitation, the first 48 rollouts are the teacher's own: supervised training on them comes first, and",
        "distillation follows at a third of its rate. Success is greedy, on 120 held-out requests. Sampler and learner run in one process, without HTTP and",
        f"LangGraph. GRPO of the other seeds ended at {REACHED:.0%}.",
    ]
    runs = [(name, seed, curve) for name in WAYS for seed, curve in sorted(kept.get(name, {}).items())]
    rows = [
        [
            *(WAYS[name].title, seed, until_reached(curve), f"{curve['held_out'][-1]:.0%}"),
            *((f"{curve['kl'][0]:.3f}", f"{curve['kl'][-1]:.3f}") if curve["kl"] else ("", "")),
        ]
        for name, seed, curve in runs
    ]
    head = [
        "way",
        "seed",
        f"rollouts until {REACHED:.0%}",
        "success at the end",
        "KL at the first step",
        "KL at the last step",
    ]
    lines += table(head, rows)
    lines += [
        "",
        "The KL to the teacher is in nats per token, on the step's rollouts before its update.",
    ]
    for name, way in WAYS.items():
        longest = max((curve for other, _, curve in runs if other == name), key=lambda curve: len(curve["rollouts"]))
        own = [[seed, *(f"{rate:.0%}" for rate in curve["held_out"])] for other, seed, curve in runs if other == name]
        width = len(longest["rollouts"])
        lines += ["", f"## Success of {way.title} after so many rollouts"]
        lines += table(
            ["seed", *(f"{rollouts:,}" for rollouts in longest["rollouts"])],
            [row + [""] * (width + 1 - len(row)) for row in own],
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Run what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the curves are kept; the page is beside it")
    parser.add_argument(
        "--teacher", type=Path, default=Path("distillation-teacher"), help="folder that keeps its checkpoint"
    )
    known = parser.parse_args()
    teacher = known.teacher / f"{STEPS:04d}"
    kept: dict[str, dict[str, Curve]] = json.loads(known.json.read_text()) if known.json.exists() else {}
    if not teacher.exists():
        kept.get("grpo", {}).pop("0", None)
    runs = [
        ("grpo", 0),
        *((name, seed) for seed in range(known.seeds) for name in ("imitation", "distillation")),
        *(("grpo", seed) for seed in range(1, known.seeds)),
    ]
    for name, seed in runs:
        if str(seed) not in kept.setdefault(name, {}):
            kept[name][str(seed)] = trained(name, seed, teacher)
            known.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    known.json.with_suffix(".md").write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
