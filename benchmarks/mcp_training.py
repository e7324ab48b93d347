"""What training changes on MCP servers: success on held-out scenarios before and after, several seeds, and a control.

`python benchmarks/mcp_training.py` takes the servers `time` and `git` (Python); `--cases memory` needs Node and `make mcp-servers`.
The scenarios of a server are made once. The untrained model samples `--probe` rollouts of each; what it solves in fewer than
`--least-solved` or in more than `--most-solved` of them is left out. (`--probe 8 24`: what none or all of the first 8 solve is left out
first.) The rest is split anew and frozen with its hash before any rollout that counts. The control is the untrained model, measured
again. The page keeps the rows of servers that are not measured this time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from offbook import LocalBackend, TrainableModel
from offbook_mcp import MCPTrainer, Target
from offbook_mcp.scenarios.generate import generate_scenarios
from offbook_mcp.scenarios.scenario import ScenarioSet, load_scenarios, save_scenarios, split_scenarios

ROOT = Path(__file__).parents[1]
SUCCESS = "success"
HELD_OUT = 0.35
"""Share of the chosen scenarios to evaluate on: more than usual, since few are chosen."""

PEOPLE = ("Ada Lovelace", "Grace Hopper", "Alan Turing", "Mary Jackson", "Emmy Noether", "Kurt Goedel")
TOWNS = ("London", "New York", "Manchester", "Hampton", "Erlangen", "Vienna")
FILES = {
    "README.md": "# Sluice\n",
    "src/engine.py": "def start() -> int:\n    return 1\n",
    "src/gauge.py": "LEVEL = 3\n",
    "docs/guide.md": "# Guide\n",
    "data/rivers.csv": "name,length\nSpree,400\n",
    "data/locks.csv": "name,height\nNiederfinow,36\n",
    "src/report.py": "def report() -> str:\n    return 'dry'\n",
    "tests/check_gauge.py": "assert 3 > 2\n",
    "docs/history.md": "# History\n",
    "config/limits.toml": "highest = 9\n",
    "scripts/refill.sh": "echo refill\n",
    "LICENSE": "Apache-2.0\n",
}
BRANCHES = (
    "feature/locks",
    "fix-gauge",
    "release-1.0",
    "docs",
    "experiments/rivers",
    "feature/reports",
    "fix-limits",
    "release-1.1",
    "cleanup",
    "experiments/refill",
    "feature/history",
    "licensing",
)


@dataclass(frozen=True)
class Case:
    """A server."""

    name: str
    target: Target


@dataclass(frozen=True)
class Row:
    """One seed. Rates are shares of held-out scenarios: greedy, and sampled at temperature 1; by_tool is of the sampled.

    held_out_by_tool: how many held-out scenarios take a tool. command: what was run. chosen: which scenarios were kept.
    """

    case: str
    command: str
    chosen: str
    seed: int
    scenarios: str
    held_out: int
    held_out_by_tool: Mapping[str, int]
    steps: int
    seconds: float
    greedy: tuple[float, float]
    sampled: tuple[float, float]
    control: float
    by_tool: Mapping[str, tuple[float, float]]


def time_case(folder: Path) -> Case:
    """The reference server for times and zones."""
    del folder
    command = shlex.join([sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"])
    return Case("time", Target.parse(command))


def memory_case(folder: Path) -> Case:
    """The reference server for a knowledge graph, which starts with a few people; each rollout has a graph of its own."""
    places = [ROOT / "node_modules", ROOT / "tests/mcp_adapter/node_modules"]
    places += [Path(os.environ["OFFBOOK_MCP_NODE"])] if "OFFBOOK_MCP_NODE" in os.environ else []
    scripts = [place / "@modelcontextprotocol/server-memory/dist/index.js" for place in places]
    script = next((each for each in scripts if each.is_file()), None)
    if script is None or shutil.which("node") is None:
        raise SystemExit("the case memory needs Node and: make mcp-servers")
    fixture = folder / "memory-fixture"
    fixture.mkdir(parents=True, exist_ok=True)
    entities = [
        {"type": "entity", "name": name, "entityType": "person", "observations": [f"lives in {town}"]}
        for name, town in zip(PEOPLE, TOWNS, strict=True)
    ]
    relations = [
        {"type": "relation", "from": one, "to": other, "relationType": "knows"} for one, other in pairwise(PEOPLE)
    ]
    lines = [json.dumps(each) for each in (*entities, *relations)]
    (fixture / "memory.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = f"MEMORY_FILE_PATH={{rollout_dir}}/memory.json {shlex.join(['node', str(script)])}"
    return Case("memory", Target.parse(command, fixture=fixture, allow_all=True))


def git_case(folder: Path) -> Case:
    """The reference server for git repositories; each rollout has a copy of one with branches, a tag and changes."""
    repository = folder / "git-fixture"
    repository.mkdir(parents=True, exist_ok=True)
    who = {"NAME": "Ada Lovelace", "EMAIL": "ada@example.com", "DATE": "2026-01-03T10:00:00+00:00"}
    fixed = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in who.items()}
    environment = os.environ | fixed | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(repository), *words], check=True, env=environment, capture_output=True)

    git("init", "--initial-branch", "main")
    git("config", "user.name", who["NAME"])
    git("config", "user.email", who["EMAIL"])
    for number, (name, text) in enumerate(FILES.items()):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(text, encoding="utf-8")
        git("add", name)
        git("commit", "--message", f"Add {name}")
        git("branch", BRANCHES[number])
    git("tag", "v1.0", "main~1")
    (repository / "src/engine.py").write_text("def start() -> int:\n    return 2\n", encoding="utf-8")
    (repository / "README.md").write_text("# Sluice\nMoves water uphill.\n", encoding="utf-8")
    git("add", "README.md")
    for name in ("notes.txt", "docs/plan.md", "data/levels.csv"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_text(f"{name}\n", encoding="utf-8")
    command = shlex.join([sys.executable, "-m", "mcp_server_git"])
    bound = {"repo_path": "{rollout_dir}"}
    return Case("git", Target.parse(command, fixture=repository, bind=bound, stateless=True, allow_all=True))


CASES = {"time": time_case, "git": git_case, "memory": memory_case}


@dataclass(frozen=True)
class Probe:
    """Sampled rollouts of each scenario, several times. One stays if between `least_solved` and `most_solved` of the last
    ones solve it, and some of the earlier ones, but not all."""

    rollouts: tuple[int, ...]
    least_solved: float
    most_solved: float

    def __str__(self) -> str:
        return f"{self.least_solved:.0%} to {self.most_solved:.0%} of {self.rollouts[-1]} sampled rollouts"


def frozen(case: Case, file: Path, count: int, probe: Probe, folder: Path) -> ScenarioSet:
    """The scenarios of a case: those of the file, or new ones, written to it."""
    if not file.exists():
        made = asyncio.run(generate_scenarios(case.target, count=count, progress=print))
        save_scenarios(sometimes_solved(case, made, probe, folder), file)
    scenarios = load_scenarios(file)
    print(
        f"{case.name}: {len(scenarios.train)} to train on, {len(scenarios.eval)} held out, tools held out: {tools_held_out(scenarios)}"
    )
    return scenarios


def how_chosen(scenarios: ScenarioSet, earlier: list[Row], probe: Probe) -> str:
    """How these scenarios were chosen: by an earlier command, if it froze them, whatever this one's options are."""
    return next((row.chosen for row in earlier if row.scenarios == scenarios.digest), str(probe))


def tools_held_out(scenarios: ScenarioSet) -> dict[str, int]:
    """How many held-out scenarios take each tool."""
    return dict(Counter(tool for each in scenarios.eval for tool in each.tools))


def sometimes_solved(case: Case, scenarios: ScenarioSet, probe: Probe, folder: Path) -> ScenarioSet:
    """The scenarios that the untrained model solves now and then, split anew."""
    backend = LocalBackend(folder)
    model = TrainableModel(f"{case.name}-probe", base_model="tiny-mcp", backend=backend)
    kept = tuple(each.model_copy(update={"split": "train"}) for each in scenarios.scenarios)
    try:
        for number, rollouts in enumerate(probe.rollouts, 1):
            last = number == len(probe.rollouts)
            least, most = (probe.least_solved, probe.most_solved) if last else (1 / rollouts, 1 - 1 / rollouts)
            trainer = MCPTrainer(case.target, model, replace(scenarios, scenarios=kept), concurrency=16)
            scores = trainer.evaluate(temperature=1.0, rollouts=rollouts).scores
            rates = {score.id: fmean(score.successes) for score in scores if score.successes}
            seldom, often = sum(rate < least for rate in rates.values()), sum(rate > most for rate in rates.values())
            print(
                f"{case.name}: of {len(rates)} scenarios {seldom} were solved in under {least:.0%} of {rollouts} rollouts, "
                f"{often} in over {most:.0%}",
                flush=True,
            )
            kept = tuple(each for each in kept if least <= rates.get(each.id, 0.0) <= most)
    finally:
        backend.close()
    return replace(scenarios, scenarios=split_scenarios(kept, held_out=HELD_OUT))


def measured(
    case: Case, scenarios: ScenarioSet, seed: int, steps: int, rollouts: int, folder: Path, command: str, chosen: str
) -> Row:
    """Train one seed from nothing."""
    backend = LocalBackend(folder)
    model = TrainableModel(f"{case.name}-{seed}", base_model="tiny-mcp", backend=backend)
    trainer = MCPTrainer(case.target, model, scenarios, seed=seed, eval_every=0, concurrency=16)
    try:
        before = trainer.evaluate(temperature=1.0, rollouts=rollouts)
        began = time.monotonic()
        report = trainer.train(steps)
        seconds = time.monotonic() - began
        after = trainer.evaluate(temperature=1.0, rollouts=rollouts)
        control = trainer.evaluate(temperature=1.0, rollouts=rollouts, step=0)
    finally:
        backend.close()
    first, last = report.evaluations[0], report.evaluations[-1]
    tools = [name for name in after.metrics if name.startswith(f"{SUCCESS}.")]
    return Row(
        case=case.name,
        command=command,
        chosen=chosen,
        seed=seed,
        scenarios=scenarios.digest,
        held_out=len(scenarios.eval),
        held_out_by_tool=tools_held_out(scenarios),
        steps=report.step,
        seconds=seconds,
        greedy=(first.success or 0.0, last.success or 0.0),
        sampled=(before.success or 0.0, after.success or 0.0),
        control=control.success or 0.0,
        by_tool={
            name.removeprefix(f"{SUCCESS}."): (before.metrics.get(name, 0.0), after.metrics[name]) for name in tools
        },
    )


def page(rows: list[Row]) -> Iterator[str]:
    """The results as Markdown."""
    yield "# Training on MCP servers: success on held-out scenarios\n"
    yield "The bundled policy `tiny-mcp`. Sampled at temperature 1; the control is the untrained model, measured again afterwards. Kept beforehand were the scenarios that it solves now and then:\n"
    for case, row in {row.case: row for row in rows}.items():
        yield f"* `{case}`: in {row.chosen}. `{row.command}`"
    yield ""
    yield "| server | scenarios (SHA-256) | held out | seed | steps | training | greedy before -> after | sampled before -> after | control |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        cells = [row.case, f"`{row.scenarios[:16]}`", row.held_out, row.seed, row.steps, f"{row.seconds / 60:.1f} min"]
        cells += [arrow(row.greedy), arrow(row.sampled), f"{row.control:.0%}"]
        yield "| " + " | ".join(str(cell) for cell in cells) + " |"
    yield "\nBy tool, sampled, means over seeds; a scenario of two tools counts for both:\n"
    yield "| server | tool | held out | before -> after |"
    yield "|---|---|---|---|"
    for case in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == case]
        for tool in sorted(own[0].held_out_by_tool):
            pairs = [row.by_tool[tool] for row in own]
            means = fmean(before for before, _ in pairs), fmean(after for _, after in pairs)
            yield f"| {case} | {tool} | {own[0].held_out_by_tool[tool]} | {arrow(means)} |"


def arrow(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.0%} -> {pair[1]:.0%}"


def main() -> None:
    """Writes the page and the rows after every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=["time", "git"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--count", type=int, default=640, help="scenarios made of a server")
    parser.add_argument(
        "--probe",
        type=int,
        nargs="+",
        default=[16],
        help="sampled rollouts that choose among them, and again among what is left",
    )
    parser.add_argument(
        "--least-solved", type=float, default=0.2, help="a scenario that fewer of them solve is left out"
    )
    parser.add_argument("--most-solved", type=float, default=0.6, help="a scenario that more of them solve is left out")
    parser.add_argument("--rollouts", type=int, default=8, help="sampled rollouts of each held-out scenario")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/mcp.md")
    options = parser.parse_args()
    probe = Probe(tuple(options.probe), options.least_solved, options.most_solved)
    command = shlex.join(["python", "benchmarks/mcp_training.py", *sys.argv[1:]])
    figures = options.output.with_suffix(".json")
    earlier = [Row(**row) for row in json.loads(figures.read_text(encoding="utf-8"))] if figures.exists() else []
    rows = [row for row in earlier if row.case not in options.cases]
    with tempfile.TemporaryDirectory(prefix="mcp-training-") as place:
        folder = Path(place)
        cases = [CASES[name](folder) for name in options.cases]
        sets = {
            case.name: frozen(
                case,
                options.output.with_suffix("") / f"{case.name}.jsonl",
                options.count,
                probe,
                folder / f"{case.name}-probe",
            )
            for case in cases
        }
        for case in cases:
            for seed in range(options.seeds):
                place_of_seed = folder / f"{case.name}-{seed}"
                scenarios = sets[case.name]
                chosen = how_chosen(scenarios, earlier, probe)
                rows.append(
                    measured(case, scenarios, seed, options.steps, options.rollouts, place_of_seed, command, chosen)
                )
                text = "\n".join(page(rows))
                options.output.write_text(text + "\n", encoding="utf-8")
                figures.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
                print(text)


if __name__ == "__main__":
    main()
