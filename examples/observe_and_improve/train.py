"""Put a trained model in the teacher's place: `python -m observe_and_improve.train`, in the folder `examples`.

`offbook improve` does the same with an app of yours; here the teacher is a script, and other paintings measure the result."""

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import cast

from measured_training import model_of, parser, write_figures
from observe_and_improve.teacher import teacher
from observe_and_improve.visitors import PAINTINGS, make_guide, scenarios

import offbook
import offbook_compare
from offbook.testing import scripted_llm
from offbook_auto.improve import Improver
from offbook_auto.options import ImproveOptions
from offbook_auto.sources import AppWithScenarios, WrappedApp

HERE = Path(__file__).parent
PARTS = slice(0, 24), slice(24, 32), slice(32, 40)
"""Paintings to train on, to choose the best step by, and to measure it on."""


def main(options: argparse.Namespace) -> None:
    model, folder = model_of("guide", options), options.dir / f"improve-guide-{options.seed}"
    train, *measured = (scenarios([*PAINTINGS][part]) for part in PARTS)
    held_out, others = (part[: options.held_out] for part in measured)
    # A tenth of the rate, and no KL to the base: the full rate with it undoes the imitation.
    config = offbook.TrainConfig(learning_rate=options.rate / 10, minibatches=2)
    sft = offbook.SFTConfig(epochs=6, batch_size=4, learning_rate=options.rate, skip_bad=True)
    with scripted_llm(teacher) as endpoint:
        os.environ["OPENAI_BASE_URL"] = endpoint.url
        guide = make_guide(model)
        app = AppWithScenarios(
            cast(WrappedApp, guide), train, held_out, options={"config": config, "seed": options.seed}
        )
        began = time.monotonic()
        report = Improver(app, ImproveOptions(sft=sft, round_steps=options.steps, rounds=2, output=folder)).run()
        minutes = (time.monotonic() - began) / 60
        best = f"step:{report.best.step}" if report.best else "step:newest"
        steps = dict.fromkeys(("step:0", best))
        compared = offbook_compare.compare(guide, others, [*steps, "as-is"], output=folder / "others")
    before, after = compared.of("step:0"), compared.of(best)
    print(f"other paintings: {before.value} before, {after.value} at {best}, gain {after.difference}")
    if options.write:
        if not (report.best and before.value and after.value and after.difference):
            raise SystemExit("no figures: a stage was not measured, see the report")
        figures = {"seed": options.seed, "base": options.base_model, "chosen": best, "chosen_stage": report.best.stage}
        figures |= {"rollouts": len(train), "before": before.value.mean, "after": after.value.mean}
        figures |= {"gain": asdict(after.difference), "stages": [point.stage for point in report.curve]}
        figures |= {"rewards": [point.mean for point in report.curve], "minutes": round(minutes, 1)}
        write_figures(figures, HERE / f"results/seed-{options.seed}.json")


if __name__ == "__main__":
    main(parser(__doc__, steps=8).parse_args())
