"""`offbook auto` on the bundled policy `tiny`, with an LLM by script over HTTP: `python -m benchmarks.auto`.

The script writes requests to an order desk along two dimensions, the prompt and the rubric, and judges each call: 1 for the
right tool and order, 0.3 for the right tool, else 0. Writes benchmarks/results/auto.md: held-out score before and after."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from offbook import LocalBackend, TrainableModel, TrainConfig
from offbook.llms import Llm
from offbook.testing import scripted_llm
from offbook_auto import AutoTrainer
from offbook_auto.report import ImproveReport
from offbook_compare.report import shown_interval
from tests.fakes.scripted_writer import DESCRIPTION, TOOLS, writer

STEPS = 36
RESULTS = Path(__file__).parent / "results" / "auto.md"


def schedule(step: int) -> TrainConfig:
    """The rate and the weight of the KL fall to 0, as in the quickstart."""
    left = 1 - (step - 1) / STEPS
    return TrainConfig(learning_rate=3.3e-3 * left, kl_coef=0.3 * left, minibatches=4)


def run(folder: Path, seed: int, held_out: int) -> ImproveReport:
    """One training; in a folder of an earlier run it goes on there."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    backend = LocalBackend(dir=folder / "server", threads=1)
    with scripted_llm(writer(seed)) as endpoint:
        prices = {"prompt": 1.0, "completion": 4.0}
        llm = Llm("openai/writer", api_base=endpoint.url, api_key="unused", cache=folder / "llms.sqlite", prices=prices)
        trainer = AutoTrainer(
            DESCRIPTION,
            llm=llm,
            tools=TOOLS,
            model=TrainableModel("desk", project="auto", base_model="tiny", backend=backend),
            steps=STEPS,
            train_inputs=120,
            held_out=held_out,
            scenarios_per_step=8,
            max_completion_tokens=48,
            config=schedule,
            seed=seed,
            output=folder / "out",
        )
        try:
            return trainer.run()
        finally:
            backend.close()


def page(reports: dict[int, ImproveReport], held_out: int) -> str:
    """The table over seeds."""
    lines = [
        "# From a description, over seeds",
        "",
        "    OMP_NUM_THREADS=1 python -m benchmarks.auto",
        "",
        f"`tiny`, {STEPS} steps of 8 inputs with 8 answers each; 120 inputs to train on, {held_out} held out, written, prompted and judged by a",
        "script over HTTP. Scores are the judge's, side by side, greedy; intervals of 95 % over held-out inputs.",
        "",
        "| seed | before | after | difference | above 0 |",
        "|---|---|---|---|---|",
    ]
    for seed, report in reports.items():
        assert report.comparison is not None
        before, after = report.comparison.candidates
        values = (before.value, after.value)
        difference = shown_interval(after.difference, sign="+")
        lines.append(
            f"| {seed} | {' | '.join(map(shown_interval, values))} | {difference} | {'yes' if report.improved else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the seeds, print the page and keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--held-out", type=int, default=160, help="inputs that the score is measured on")
    parser.add_argument("--folder", type=Path, help="keep the runs here; finished ones are only compared again")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="auto-") as temporary:
        folder: Path = options.folder or Path(temporary)
        reports = {seed: run((folder / str(seed)).absolute(), seed, options.held_out) for seed in options.seeds}
    options.results.write_text(page(reports, options.held_out), encoding="utf-8")
    print(page(reports, options.held_out))


if __name__ == "__main__":
    main()
