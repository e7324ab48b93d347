"""Draw each example's curve, and write the tables of docs/examples.md and of each README, from the figures in `results/`:
`python gallery.py`, in the folder `examples`. A training writes its figures with `--write`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from gpu_forms import table as gpu_table

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/examples.md"
SMALL = HERE.parent / "docs/images/examples"
"""The pictures of the table."""
BEGIN, END = "<!-- figures: python gallery.py -->", "<!-- end of figures -->"
GPU = "<!-- GPU forms: python gallery.py -->", "<!-- end of GPU forms -->"


@dataclass(frozen=True)
class Example:
    """`results`: the files of its seeds, as a pattern. `score`: what its reward is. `curve`: the picture in its folder."""

    folder: str
    results: str
    learned: str
    score: str
    curve: str = "curve.png"


EXAMPLES = (
    Example("guess_number", "seed-*.json", "to halve the numbers that are left", "found in three guesses"),
    Example(
        "tic_tac_toe", "random-seed-*.json", "to take squares that win against a random player", "1 a win, 0.5 a draw"
    ),
    Example("game_2048", "seed-*.json", "which way to push on a board of 2x2", "log2 of the score"),
    Example(
        "codenames", "code-seed-*.json", "a code, by two models that see only each other's words", "words understood"
    ),
    Example("typescript_agent", "seed-*.json", "which tool answers, by an agent on Node", "the right answer"),
    Example("temporal_clue", "look-up-seed-*.json", "which tool looks up what", "the right guest named"),
    Example(
        "customer_service", "seed-*.json", "a rule, over several turns, with SQLite", "1 by the rule, -1 against it"
    ),
    Example(
        "supervisor_agent", "seed-*.json", "whom to ask, and which tool; three models", "1 answered, 0.3 right worker"
    ),
    Example("existing_server", "seed-*.json", "which desk answers an e-mail", "the right desk"),
    Example("observe_and_improve", "seed-*.json", "what a paid model does, by imitation", "the right answer, greedy"),
    Example("auto_rl", "seed-*.json", "what a judge likes, from a description", "the judge's, greedy"),
    Example("mcp_rl", "seed-*.json", "which tool of an MCP server answers", "0.2 tool, 0.4 arguments, 0.4 answer"),
    Example(
        "langgraph_email_agent", "seed-*.json", "to search, read, then answer", "0.1 found, 0.3 read, 1 right; greedy"
    ),
    Example(
        "langgraph_email_agent",
        "ruler-seed-*.json",
        "the same, by a judge",
        "0.1 found, 0.3 read, 1 right; greedy",
        "curve-ruler.png",
    ),
)


def figures_of(example: Example) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((HERE / example.folder / "results").glob(example.results))]


def draw(example: Example, seeds: Sequence[dict[str, Any]]) -> None:
    """The mean reward of each iteration's rollouts, a line a seed, and the held-out means before and after."""
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for number, seed in enumerate(seeds):
        axes.plot(range(1, len(seed["rewards"]) + 1), seed["rewards"], color=f"C{number}", label=f"seed {seed['seed']}")
        ends = (
            [0, len(seed["rewards"])] if "stages" not in seed else [1, seed["stages"].index(seed["chosen_stage"]) + 1]
        )
        axes.plot(ends, [seed["before"], seed["after"]], "o", color=f"C{number}", markersize=5)
    staged = "stages" in seeds[0]
    if staged:
        axes.set_xticks(range(1, len(seeds[0]["stages"]) + 1), seeds[0]["stages"])
    shown = "choosing (lines), other paintings (dots)" if staged else "rollouts (lines), held out (dots)"
    axes.set(xlabel="stage" if staged else "iteration", ylabel=example.score, title=f"{example.folder}: {shown}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(HERE / example.folder / example.curve, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_small(example: Example, seeds: Sequence[dict[str, Any]]) -> str:
    """The same lines without words, for a cell of the table. Returns the picture's name."""
    figure, axes = plt.subplots(figsize=(1.8, 0.7), layout="constrained")
    for number, seed in enumerate(seeds):
        axes.plot(seed["rewards"], color=f"C{number}", linewidth=1)
    axes.axis("off")
    name = f"{example.folder}{example.curve.removeprefix('curve')}"
    figure.savefig(SMALL / name, dpi=100, transparent=True, metadata={"Software": None})
    plt.close(figure)
    return name


def write_seeds(example: Example, seeds: Sequence[dict[str, Any]]) -> None:
    """The seeds' figures, in the example's README below its curve."""
    table = [
        f"The base is `{seeds[0]['base']}`, a bundled policy of 3.3 million parameters. Score: {example.score}.",
        "",
    ]
    table += ["| seed | before | after | 95 % interval of the gain | rollouts | minutes |", "|---|" + "---|" * 5]
    for seed in seeds:
        gain = f"{seed['gain']['low']:.2f} to {seed['gain']['high']:.2f}"
        means = f"{seed['before']:.2f} | {seed['after']:.2f}"
        table.append(f"| {seed['seed']} | {means} | {gain} | {seed['rollouts']:,} | {seed['minutes']:.1f} |")
    block = "\n".join(["\n<!-- seeds: python gallery.py -->", *table, "<!-- end of seeds -->\n"])
    readme = HERE / example.folder / "README.md"
    curve = rf"(!\[[^\]]*\]\({re.escape(example.curve)}\)\n)(\n<!-- seeds.*?end of seeds -->\n)?"
    text, found = re.subn(curve, lambda match: match[1] + block, readme.read_text(), count=1, flags=re.DOTALL)
    assert found, f"{readme} does not show {example.curve}"
    readme.write_text(text)


def draw_takeover() -> None:
    """The share of the shop's customers whom the small model answers and of right answers, over customers, with what happened."""
    told = json.loads((HERE / "on_the_job/results/seed-0.json").read_text())
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    threads = [each["threads"] for each in told["rows"]]
    right = [each["right"] for each in told["rows"]]
    means = [sum(right[max(0, index - 4) : index + 1]) / min(5, index + 1) for index in range(len(right))]
    axes.plot(threads, means, label="right answers, of the last 160", linewidth=1)
    small = [each["small"] for each in told["rows"]]
    axes.plot(threads, small, label="answered by the small model, of 32", linewidth=1)
    for number, mark in enumerate(told["marks"]):
        axes.axvline(mark["threads"], color="0.6", linewidth=0.8, linestyle=":")
        axes.text(mark["threads"], 1.03, "ABCDEFGH"[number], ha="center", fontsize=8)
    legend = "\n".join(f"{'ABCDEFGH'[number]}  {mark['what']}" for number, mark in enumerate(told["marks"]))
    axes.set(xlabel=f"customers\n\n{legend}", ylabel="share", ylim=(-0.03, 1.1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left")
    figure.savefig(HERE / "on_the_job/shares.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw_self_play() -> None:
    """The shares of wins and of draws in self-play, against each opponent, a line for each seed."""
    paths = sorted((HERE / "tic_tac_toe/results").glob("self-play-seed-*.json"))
    shown = (("random", "win"), ("random", "draw"), ("perfect", "draw"))
    figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained", sharey=True)
    for number, told in enumerate(json.loads(path.read_text()) for path in paths):
        steps = [point["step"] for point in told["curve"]]
        for place, (opponent, outcome) in zip(axes, shown, strict=True):
            rates = [point[opponent][outcome] for point in told["curve"]]
            place.plot(steps, rates, color=f"C{number}", label=f"seed {told['seed']}")
            place.set(xlabel="step of self-play", title=f"{outcome}s, {opponent} player", ylim=(0, 1))
            place.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of 300 matches")
    axes[2].legend(frameon=False)
    figure.savefig(HERE / "tic_tac_toe/self-play.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


def rows(example: Example, seeds: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """The example's rows in the table of what is learned and in that of its figures, a line for each seed."""
    name = f"[{example.folder}](../examples/{example.folder}/README.md)"
    before_after = [f"{seed['before']:.2f} → {seed['after']:.2f}" for seed in seeds]
    gains = [f"{seed['gain']['low']:.2f} to {seed['gain']['high']:.2f}" for seed in seeds]
    rollouts = [f"{seed['rollouts']:,}" for seed in seeds]
    minutes = [f"{seed['minutes']:.0f}" if seed["minutes"] >= 10 else f"{seed['minutes']:.1f}" for seed in seeds]
    bases = sorted({seed["base"] for seed in seeds})
    picture = f"![Its curve](images/examples/{draw_small(example, seeds)})"
    first = (picture, name, example.learned, example.score, lines(before_after))
    second = (f"{example.folder}: {example.learned}", *map(lines, (gains, bases, rollouts, minutes)))
    return f"| {' | '.join(first)} |", f"| {' | '.join(second)} |"


def lines(values: Sequence[str]) -> str:
    """A cell with a line for each value, none of which is broken."""
    return "<br>".join(values).replace(" ", "\N{NO-BREAK SPACE}")


def main() -> None:
    SMALL.mkdir(exist_ok=True)
    learned = ["| curve | example | what is learned | score | held out, a seed each |", "|---|" + "---|" * 4]
    figures = ["| example | 95 % interval of the gain | base | rollouts | minutes |", "|---|" + "---|" * 4]
    for example in EXAMPLES:
        if seeds := figures_of(example):
            draw(example, seeds)
            write_seeds(example, seeds)
            first, second = rows(example, seeds)
            learned.append(first)
            figures.append(second)
    draw_takeover()
    draw_self_play()
    text = PAGE.read_text()
    for (begin, end), table in (((BEGIN, END), [*learned, "", *figures]), (GPU, gpu_table())):
        before, after = text.split(begin)[0], text.split(end)[1]
        text = f"{before}{begin}\n" + "\n".join(table) + f"\n{end}{after}"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
