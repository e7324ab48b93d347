"""A seeded campaign of kills and damage against real processes; the table of what came of it.

    python -m tests.campaign --kills 100 [--seed 0] [--table benchmarks/results/campaign.md]

Clients roll out in every API, run programs as rollouts, train, download and keep state while one thing at a time is hurt: a
client, a program, the server, the sampler or the learner is killed with signal 9 or stopped for a while, the disk is full, a file
is damaged or gone, the wall clock jumps, a supervised training or an import is cut off. After each, everything that was answered is looked up. One line per event; the
exit code is 1 when a promise was broken. Ctrl-C or SIGTERM lets the event end, makes the last check and writes the table; a second
one ends the campaign at once.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .campaign import Campaign, Outcome, decks

HEAD = """# A campaign of kills and damage

    {command}

Real processes under load: a server with the embedded engine and the bundled policy, and two clients that roll out in five APIs,
streamed and whole, run programs by `Command` and `offbook wrap`, train, download the newest LoRA and keep state. One part at a time
was killed with signal 9 or hurt as the first column says. After each, every call that was ever answered was looked up in the records
with its tokens or its text, every finished rollout, every train request and its step, every download, and the state. In an event `sft`
the client, the server or the learner of a `train_sft` of 8 updates is killed in mid-epoch, and the same call has to end at step 8; in an event `import` the
server and `offbook import` are killed, and the same command has to make a model with the same tensors that answers. An answer with
another status than 408, 429, 502, 503 or 507 to a request that may be sent again is a broken promise too.
"Sent again": requests that got no answer or an error, each time they were sent. "Lost" and "twice" count broken promises.
The last row says how many events there were: a campaign that is stopped leaves the table of those until then.

| hurt | events | calls answered | steps trained | sent again | lost | applied twice | not back | `verify` | longest until answered, s |
|---|---|---|---|---|---|---|---|---|---|
"""


def table(outcomes: list[Outcome], command: str) -> str:
    """A row for each part, and one for all."""
    parts = dict.fromkeys(outcome.part for outcome in sorted(outcomes, key=lambda each: each.part))
    rows = [_row(part, [each for each in outcomes if each.part == part]) for part in parts]
    return HEAD.format(command=command) + "\n".join([*rows, _row("**all**", outcomes)]) + "\n"


def _row(part: str, those: list[Outcome]) -> str:
    broken = [line for outcome in those for line in outcome.broken]
    verified = [outcome.verify for outcome in those if outcome.verify]
    told = ", ".join(f"{verified.count(kind)} {kind}" for kind in dict.fromkeys(sorted(verified))) or "-"
    cells: list[object] = [part, len(those)]
    cells += [sum(each.calls for each in those), sum(each.steps for each in those)]
    cells += [sum(each.unanswered for each in those)]
    twice, away = (sum(line.startswith(kind) for line in broken) for kind in ("twice", "not back"))
    cells += [len(broken) - twice - away, twice, away]
    cells += [told, f"{max(each.back for each in those):.1f}"]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def run(
    folder: Path,
    kills: int,
    seed: int,
    show: Callable[[list[Outcome]], object] = len,
    stop: Callable[[], bool] = lambda: False,
) -> list[Outcome]:
    """Every event and the end, printed as they happen. `show` gets what came of them so far; no event begins once `stop()`."""
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with Campaign(folder, seed) as campaign:
        campaign.begin()
        print(f"{time.monotonic() - began:7.1f} s  the first steps are trained", flush=True)
        for number, part in enumerate(decks(kills, random.Random(seed)), 1):
            if stop():
                break
            outcomes.append(campaign.event(part))
            print(f"{time.monotonic() - began:7.1f} s  {number}. {outcomes[-1].line()}", flush=True)
            show(outcomes)
        end = campaign.finish()
        print(f"{time.monotonic() - began:7.1f} s  {end.line()}", flush=True)
    end.calls = end.steps = 0  # they were counted by their events
    show([*outcomes, end])
    return [*outcomes, end]


def stop_signal() -> threading.Event:
    """Set by the first SIGINT or SIGTERM; the second does what it does by default."""
    told = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def tell(*_: object) -> None:
        told.set()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, tell)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="write the table of outcomes to this Markdown file")
    parser.add_argument("--keep", type=Path, help="use this new folder, and leave it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="campaign-") as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        words = f"python -m tests.campaign --kills {options.kills} --seed {options.seed}"

        def show(outcomes: list[Outcome]) -> None:
            if options.table is not None:
                options.table.write_text(table(outcomes, words), "utf-8")

        outcomes = run(folder, options.kills, options.seed, show, stop_signal().is_set)
    print(table(outcomes, words))
    return 1 if any(outcome.broken for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
