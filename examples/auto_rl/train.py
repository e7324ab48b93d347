"""Train from a description, with an LLM by script over HTTP: `python -m auto_rl.train`, in the folder `examples`."""

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from auto_rl.writer import DESCRIPTION, TOOLS, reply
from measured_training import falling, model_of, parser, write_figures

import offbook_auto
from offbook.llms import Llm
from offbook.testing import scripted_llm

HERE = Path(__file__).parent


def main(options: argparse.Namespace) -> None:
    folder = options.dir / f"auto-{options.seed}"
    with scripted_llm(reply) as endpoint:
        trainer = offbook_auto.AutoTrainer(
            DESCRIPTION,
            llm=Llm("openai/writer", api_base=endpoint.url, api_key="unused", cache=options.dir / "llms.sqlite"),
            tools=TOOLS,
            model=model_of("trains", options),
            steps=options.steps,
            train_inputs=60,
            held_out=60 if options.held_out is None else options.held_out,
            scenarios_per_step=8,
            max_completion_tokens=48,
            config=falling(options, 0.3, minibatches=2),
            seed=options.seed,
            output=folder,
        )
        started = time.monotonic()
        report = trainer.run()
        minutes = (time.monotonic() - started) / 60
    if not options.write:
        return
    if report.comparison is None or report.training is None:
        raise SystemExit("no figures: the run ended before its comparison")
    before, after = report.comparison.candidates
    if before.value is None or after.value is None or after.difference is None:
        raise SystemExit("no figures: the judge scored no held-out input")
    if report.training.stopped == "nothing_left":
        raise SystemExit("no figures: the model had been trained before this run; take another --dir")
    figures = {"seed": options.seed, "base": options.base_model, "before": before.value.mean, "after": after.value.mean}
    figures |= {"gain": asdict(after.difference), "steps": report.training.step}
    figures |= {"rewards": [each.reward for each in report.training.iterations]}
    figures |= {"rollouts": 64 * len(report.training.iterations), "minutes": round(minutes, 1)}
    write_figures(figures, HERE / f"results/seed-{options.seed}.json")


if __name__ == "__main__":
    main(parser(__doc__, steps=36).parse_args())
