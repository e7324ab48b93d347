"""Simulated takeovers: how often a policy that is worse is passed, and how many threads one that is equal needs.

    python benchmarks/takeover.py [--takeovers 200] [--seed 0]

Writes benchmarks/results/takeover.md.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offbook.server.takeover.evidence import REFERENCE, MeanBets, SequentialComparison, threads_needed

UPSTREAM = 0.92
"""Share of threads that the paid model does well."""
ALPHA = 0.05
MARGINS = (0.2, 0.1, 0.05)
SHARES = (0.01, 0.05, 0.25)
POLICIES: tuple[str, ...] = ("equal", "worse", "twice", "half")
AGREEMENT, LEAST_AGREEMENT = 0.9, 0.8
VARIANCE = UPSTREAM * (1 - UPSTREAM)
RESULTS = Path(__file__).parent / "results" / "takeover.md"

Ends = NDArray[np.int64]
"""The outcome of the small model after which each takeover ended a stage so; 0: it did not."""


def stage(draw: np.random.Generator, number: int, good: float, margin: float, share: float) -> tuple[Ends, Ends, int]:
    """Where each of `number` takeovers passed a stage, and where it left it; and the most outcomes it could use."""
    comparison = SequentialComparison(margin, share, ALPHA, (number,))
    passed, left = np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
    most = threads_needed(margin, share, VARIANCE)[1]
    others = min(REFERENCE, round((1 - share) / share))
    for count in range(1, most + 1):
        comparison.add((draw.random(number) < good).astype(float), tested=True)
        for _ in range(others):
            comparison.add((draw.random(number) < UPSTREAM).astype(float), tested=False)
        running = (passed == 0) & (left == 0)
        worse = comparison.worse()
        left[running & worse] = count
        passed[running & ~worse & comparison.not_worse()] = count
        if not ((passed == 0) & (left == 0)).any():
            break
    return passed, left, most


def shadow(draw: np.random.Generator, number: int, agreement: float) -> tuple[Ends, int]:
    """Where each takeover passed the shadow stage."""
    gap = AGREEMENT - LEAST_AGREEMENT
    bets = MeanBets(gap, (number,))
    most = threads_needed(gap, 0.0, VARIANCE)[1]
    passed = np.zeros(number, dtype=np.int64)
    for count in range(1, most + 1):
        bets.add((draw.random(number) < agreement).astype(float))
        passed[(passed == 0) & bets.above_level(LEAST_AGREEMENT, ALPHA)] = count
    return passed, most


def median(ends: Ends) -> str:
    """The median of the takeovers that ended so, as text."""
    return f"{np.median(ends[ends > 0]):.0f}" if (ends > 0).any() else "-"


def percent(ends: Ends) -> str:
    """The share of takeovers that ended so, as text."""
    return f"{100 * float(np.mean(ends > 0)):.1f} %"


def quality(policy: str, margin: float) -> float:
    """The share of threads that a policy does well."""
    return {
        "equal": UPSTREAM,
        "worse": UPSTREAM - margin,
        "twice": UPSTREAM - 2 * margin,
        "half": UPSTREAM / 2,
    }[policy]


Case = tuple[float, float, str, int, int]
"""Margin, share of threads, policy, number of takeovers, seed."""


def case(wanted: Case) -> tuple[Ends, Ends, int]:
    """The stage of each takeover with these settings."""
    margin, share, policy, number, seed = wanted
    draw = np.random.default_rng((seed, round(1000 * margin), round(1000 * share), POLICIES.index(policy)))
    ends = stage(draw, number, quality(policy, margin), margin, share)
    print(
        f"margin {margin:g}, share {share:g}, {policy}: passed {percent(ends[0])}, left {percent(ends[1])}", flush=True
    )
    return ends


def rows_of(margin: float, ends: dict[tuple[float, float, str], tuple[Ends, Ends, int]]) -> list[str]:
    """The rows of a margin: its live stages, and the takeovers that passed all of them."""
    rows: list[str] = []
    for share in SHARES:
        equal, worse = ends[margin, share, "equal"], ends[margin, share, "worse"]
        cells = [f"{margin:g}", f"{share:.0%}", f"{equal[2]:,}", f"{equal[2] / share:,.0f}"]
        cells += [percent(equal[0]), median(equal[0]), percent(worse[0])]
        for policy in ("twice", "half"):
            left = ends[margin, share, policy][1]
            cells.append(f"{percent(left)}, {median(left)}")
        rows.append(f"| {' | '.join(cells)} |")
    whole = [np.prod([ends[margin, share, policy][0] > 0 for share in SHARES], axis=0) for policy in POLICIES[:2]]
    return [*rows, f"| {margin:g} | all | | | {percent(whole[0])} | | {percent(whole[1])} | | |"]


TEXT = """# Simulated takeovers

`python benchmarks/takeover.py --takeovers {number} --seed {seed}` writes this page. It simulates takeovers with the test that [the gateway](../../docs/gateway.md) uses. The paid model does {upstream:.0%} of its threads well. Each stage begins with no evidence, at alpha = {alpha:g}.

A stage passes when the small model is shown to be worse by less than the margin. It is left when it is shown to be worse by more, or when its threads are used up.

| margin | stage | most threads of the small model | of all traffic | equal: passed | median threads | worse by the margin: passed | worse by twice: found, median threads | half as good: found, median threads |
|---|---|---|---|---|---|---|---|---|
{rows}

The rows `all` count the takeovers that passed the three stages, each with draws of its own.

In the shadow stage nothing is compared with an outcome. The share of equal answers must be above {least:g}, in at most {most} answers. With a share of {agreement:g}, {agrees} pass, after {after} answers in the median; with a share of {least:g}, {just} pass.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--takeovers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    number, seed = options.takeovers, options.seed
    cases = list(product(reversed(MARGINS), SHARES, POLICIES, [number], [seed]))
    with ProcessPoolExecutor() as pool:
        ends = {wanted[:3]: result for wanted, result in zip(cases, pool.map(case, cases), strict=True)}
    rows = [row for margin in MARGINS for row in rows_of(margin, ends)]
    draw = np.random.default_rng(seed)
    agrees, most = shadow(draw, number, AGREEMENT)
    just, _ = shadow(draw, number, LEAST_AGREEMENT)
    text = TEXT.format(
        number=number,
        seed=seed,
        upstream=UPSTREAM,
        alpha=ALPHA,
        rows="\n".join(rows),
        least=LEAST_AGREEMENT,
        most=most,
        agreement=AGREEMENT,
        agrees=percent(agrees),
        after=median(agrees),
        just=percent(just),
    )
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
