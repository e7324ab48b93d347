"""Train on a server that runs elsewhere: `python -m existing_server.train --url http://host:8000`, in `examples`."""

import argparse
from pathlib import Path

from existing_server.agent import sort
from measured_training import parser, rollout_of, train_measured

import offbook

HERE = Path(__file__).parent
SUBJECTS = {
    "sales": ("a quote for {}", "do you have {} in blue", "what would {} cost us", "we would like to order {}"),
    "repair": ("{} does not start", "{} makes a noise", "water comes out of {}", "{} fell down"),
    "payroll": ("my pay slip of {}", "overtime in {}", "leave in {}", "the bonus for {}"),
}
THINGS = ("pumps", "saws", "the lift", "the oven", "fans", "the press", "drills", "the mixer", "lamps", "scales")
MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october")


def mails(first: int, last: int) -> list[dict[str, str]]:
    """Each kind of subject, with the things or months from `first` to `last`."""
    return [
        {"subject": subject.format(word), "desk": desk}
        for desk, subjects in SUBJECTS.items()
        for subject in subjects
        for word in (MONTHS if desk == "payroll" else THINGS)[first:last]
    ]


def main(options: argparse.Namespace) -> None:
    backend = offbook.RemoteBackend(options.url, api_key=options.api_key)
    model = offbook.TrainableModel(f"mail-room-{options.seed}", "examples", options.base_model, backend=backend)
    trainer = offbook.Trainer(
        model,
        rollout_of(sort),
        mails(0, 7),
        scenarios_per_step=12,
        config=offbook.TrainConfig(learning_rate=options.rate, kl_coef=0.05, minibatches=2),
        seed=options.seed,
    )
    train_measured(trainer, options, mails(7, 10), HERE / f"results/seed-{options.seed}.json")


if __name__ == "__main__":
    arguments = parser(__doc__, steps=15, local=False)
    arguments.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    arguments.add_argument("--api-key", help="of the server, if it wants one; none: OFFBOOK_API_KEY")
    main(arguments.parse_args())
