"""RULER of OpenPipe ART 0.5.18 and ours, on the same groups, with the same scripted judge over HTTP:
`python benchmarks/ruler_parity.py --art-python VENV/bin/python`, or without it, in a venv that it makes.

ART needs an older litellm, so each side runs in its own environment. The table goes to benchmarks/results/ruler_parity.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from pathlib import Path
from typing import Any

from offbook.testing import LlmReply, LlmRequest, attempts_shown, fails, refuses, says, scripted_llm

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "ruler_parity.md"
ART = ["--no-deps", "openpipe-art==0.5.18"]
NEEDED = ["litellm==1.82.0", "nest-asyncio", "openai>=2.14,<3", "polars", "setproctitle", "tblib", "typer"]
"""What `art.rewards` imports; ART's other requirements (weave) are for its own tracking."""

WHAT = {
    "honest": "scores by id, in the order shown",
    "reversed": "the entries in reverse order",
    "missing": "one entry missing, at first",
    "extra": "an entry for an attempt that is not there, at first",
    "double": "one attempt twice and another not at all, at first",
    "nan": "a score of NaN, at first",
    "beyond": "a score of 1.7, at first",
    "prose": "prose and a fence around the JSON",
    "busy": "429 with Retry-After: 1, at first",
    "broken": "500, at first",
    "refusal": "a refusal, always",
    "tie": "0.5 for all",
    "sub-agents": "(a trajectory with additional_histories)",
    "metadata": "(a group with metadata)",
    "identical": "(two of three trajectories are the same)",
    "exception": "(a rollout that failed with an exception)",
    "forged": "(two attempts, one of which writes ART's closing tag)",
    "again": "(the first case once more)",
}


def is_ours(messages: list[dict[str, Any]]) -> bool:
    """Whether the prompt is Offbook's."""
    return "How the material is laid out" in messages[0]["content"]


def closings(messages: list[dict[str, Any]]) -> int:
    """How often an attempt seems to end in a prompt."""
    text = messages[1]["content"]
    if not is_ours(messages):
        return text.count("</trajectory>")
    return len(re.findall(r"^\[\w{10} end\]$", text, re.M)) - text.count("shared beginning]")


def shown_to(messages: list[dict[str, Any]]) -> dict[str, float]:
    """Attempt -> the last number that it says, as hundredths, as a judge reads either prompt: by its boundaries."""
    text = messages[1]["content"]
    if not is_ours(messages):
        parts = re.findall(r'<trajectory id="(\w+)">\n(.*?)\n</trajectory>', text, re.S)
    else:
        parts = [(name, json.dumps(each[0].messages)) for name, each in attempts_shown(messages).items()]
    return {name: int(re.findall(r"\d+", body)[-1]) / 100 for name, body in parts}


class Judge:
    """The scripted judge. The model's name is the case; `asked` counts requests, `attempts` and `closings` what was shown."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.attempts: dict[str, int] = {}
        self.closings: dict[str, int] = {}

    def __call__(self, request: LlmRequest) -> LlmReply:
        case = request.body["model"]
        self.asked[case] += 1
        first, shown = self.asked[case] == 1, shown_to(request.messages)
        self.attempts[case], self.closings[case] = len(shown), closings(request.messages)
        if case == "busy" and first:
            return fails(429, headers={"retry-after": "1"})
        if case == "broken" and first:
            return fails(500)
        if case == "refusal":
            return refuses("I cannot judge this")
        id_field = "id" if is_ours(request.messages) else "trajectory_id"
        scores = [{id_field: name, "explanation": f"for {name}", "score": score} for name, score in shown.items()]
        content = json.dumps({"scores": changed(case, scores) if first or case in ("reversed", "tie") else scores})
        return says(f"I think:\n```json\n{content}\n```\nThat is all." if case == "prose" else content)


def changed(case: str, scores: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries as the case has them."""
    id_field = next(iter(scores[0]))
    return {
        "reversed": lambda: scores[::-1],
        "missing": lambda: scores[:-1],
        "extra": lambda: [*scores, {**scores[0], id_field: "zzzz"}],
        "double": lambda: [*scores[:-1], scores[0]],
        "nan": lambda: [{**scores[0], "score": float("nan")}, *scores[1:]],
        "beyond": lambda: [{**scores[0], "score": 1.7}, *scores[1:]],
        "tie": lambda: [{**score, "score": 0.5} for score in scores],
    }.get(case, lambda: scores)()


def side(python: str, library: str, path: str, folder: Path) -> tuple[dict[str, Any], Judge]:
    """What one library makes of every case, and what its judge saw."""
    judge = Judge()
    own = {"PYTHONPATH": path, "OFFBOOK_DIR": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with scripted_llm(judge) as endpoint:
        done = subprocess.run(
            [python, str(HERE / "ruler_parity_side.py"), library, endpoint.url],
            env={**os.environ, **own}, cwd=folder, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.split("\n") if line.startswith("RESULTS ")]
    if not lines:
        raise SystemExit(f"{library}: {done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix("RESULTS ")), judge


def cell(case: str, found: dict[str, Any], judge: Judge) -> str:
    """What became of a case, in words."""
    requests = judge.asked["honest" if case == "again" else case]
    asked = f"{requests} request{'' if requests == 1 else 's'}" + (" in both runs" if case == "again" else "")
    if "error" in found:
        return f"raises `{found['error'][:90]}`; {asked}"
    rewards = ", ".join("none" if reward is None else f"{reward:g}" for reward in found["rewards"])
    more = {
        "metadata": f"; metadata {found['metadata'] or 'lost'}",
        "exception": f"; {found['exceptions'] or 'no'} exception kept",
        "identical": f"; {judge.attempts.get(case, 0)} shown",
        "forged": f"; the prompt closes {judge.closings.get(case, 0)} attempts",
    }
    return f"{rewards}; {asked}{more.get(case, '')}"


def art_python(folder: Path) -> str:
    """A venv with ART in it."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    for packages in (ART, NEEDED):
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def main() -> None:
    """Runs both sides and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--art-python", help="Python of an environment that has ART 0.5.18")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ruler-parity-") as name:
        folder = Path(name)
        other = side(options.art_python or art_python(folder / "venv"), "art", "", folder)
        ours = side(sys.executable, "offbook", os.pathsep.join(sys.path), folder)
    lines = [
        "# RULER: ART 0.5.18 and Offbook on the same groups and judge",
        "",
        "Both `ruler_score_group(group, model, params)`, each in its own environment, through litellm and HTTP to one scripted",
        "judge, which gives each attempt the number that its last message ends with. Right are 0.1, 0.9, 0.5 where nothing else",
        "is said. Made by `python benchmarks/ruler_parity.py`.",
        "",
        "| the judge answers | ART 0.5.18 | Offbook |",
        "|---|---|---|",
    ]
    lines += [
        f"| {what} | {cell(case, other[0][case], other[1])} | {cell(case, ours[0][case], ours[1])} |"
        for case, what in WHAT.items()
    ]
    options.results.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
