"""The quickstart over several seeds, each in a folder of its own: `python benchmarks/quickstart.py --seeds 5`.

Other options, such as `--steps 12`, go to `offbook quickstart`, which refuses those it does not know."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(seed: int, options: list[str]) -> dict[str, float]:
    """One quickstart in a new process; success in percent, seconds of training (rollouts and updates) and of all."""
    with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
        results = Path(folder, "results.json")
        command = [sys.executable, "-m", "offbook", "quickstart", "--seed", str(seed), *options]
        began = time.monotonic()
        subprocess.run([*command, "--output", str(Path(folder, "run")), "--results", str(results)], check=True)
        took = time.monotonic() - began
        found = json.loads(results.read_text(encoding="utf-8"))
    trained = sum(found["seconds"]["rollout"]) + sum(found["seconds"]["train"])
    rates = {
        f"{kind} {when}": 100 * found[key][when]
        for kind, key in (("greedy", "success"), ("sampled", "sampled"))
        for when in ("before", "after")
    }
    return {"seed": seed, **rates, "training s": trained, "all s": took}


def main() -> None:
    """Prints one row per seed as Markdown, and keeps what was measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the rows are written")
    known, options = parser.parse_known_args()
    rows: list[dict[str, float]] = []
    for seed in range(known.seeds):
        rows.append(run(seed, options))
        if known.json is not None:
            known.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{value:.0f}" for value in row.values()) + " |")


if __name__ == "__main__":
    main()
