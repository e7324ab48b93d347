"""Seconds of one training step (forward, backward, clip, AdamW) for each layout, beside TRL 1.4's GRPO loss path.

    python benchmarks/learner_step.py --json benchmarks/results/learner_step.json [--trl-python PYTHON]

The columns take turns within one run and medians are shown, so that a busy machine slows them alike. TRL needs an
environment of its own: python -m venv DIR && DIR/bin/pip install trl==1.4.0 torch==2.13.0 transformers==5.17.0
peft==0.21.2 requests, then --trl-python DIR/bin/python. `--clock cpu` counts processor seconds instead of elapsed ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from offbook.base.config import LoraOptions
from offbook.engine.learner.model.policy import Policy
from offbook.engine.learner.rows.layouts import LayoutPlan, plan
from offbook.engine.protocol import Sample
from offbook.engine.sampling import TargetSettings

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
WORKER = Path(__file__).with_name("trl_step.py")
RATE = 1e-5


@dataclass(frozen=True)
class Model:
    """A Qwen2 of random weights."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int

    def write(self, folder: Path) -> Path:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        Qwen2ForCausalLM(config).save_pretrained(folder)
        return folder


@dataclass(frozen=True)
class Case:
    """`rollouts[i]`: a prompt, and per turn (sampled tokens, tool tokens after them)."""

    name: str
    model: str
    rollouts: tuple[tuple[np.ndarray, tuple[tuple[np.ndarray, np.ndarray], ...]], ...]

    def rows(self) -> list[Sample]:
        """One row per call."""
        rows: list[Sample] = []
        offset = 0
        for prompt, turns in self.rollouts:
            context = prompt
            for sampled, tool in turns:
                rows.append(Sample.bare(context, sampled, offset))
                offset += len(sampled)
                context = np.concatenate([context, sampled, tool])
        return rows

    def whole(self) -> list[dict[str, list[int]]]:
        """One row per rollout, as TRL takes multi-turn episodes: the last turn's tool tokens left out."""
        rows: list[dict[str, list[int]]] = []
        for prompt, turns in self.rollouts:
            parts = [part for turn in turns for part in turn][:-1]
            mask = [1 - i % 2 for i, part in enumerate(parts) for _ in part]
            rows.append({"prompt": prompt.tolist(), "completion": np.concatenate(parts).tolist(), "mask": mask})
        return rows


def cases(models: dict[str, Model], names: list[str]) -> list[Case]:
    draw = np.random.default_rng(0)

    def group(model: str, prompt: int, completion: tuple[int, int], size: int, turns: int = 1, tool: int = 0):
        def ids(count: int) -> np.ndarray:
            return draw.integers(0, models[model].vocabulary, count).astype(np.int32)

        start = ids(prompt)
        return tuple(
            (start, tuple((ids(int(draw.integers(completion[0], completion[1] + 1))), ids(tool)) for _ in range(turns)))
            for _ in range(size)
        )

    made = [
        Case("200+100 x 8", "30M", group("30M", 200, (100, 100), 8)),
        Case("1000+100 x 8", "30M", group("30M", 1000, (100, 100), 8)),
        Case("2000+50 x 16", "30M", group("30M", 2000, (50, 50), 16)),
        Case("six-turn agent x 8", "30M", group("30M", 1000, (60, 60), 8, turns=6, tool=120)),
        Case("tiny: 8 groups, 70+30 x 8", "tiny", sum((group("tiny", 70, (20, 40), 8) for _ in range(8)), ())),
        Case("tiny: 200+100 x 8", "tiny", group("tiny", 200, (100, 100), 8)),
        Case(
            "tiny: 8 conversations of six turns",
            "tiny",
            sum((group("tiny", 200, (30, 30), 1, turns=6, tool=40) for _ in range(8)), ()),
        ),
    ]
    return [case for case in made if not names or case.name in names]


class Ours:
    """One policy; a column is a forced or planned layout."""

    def __init__(self, base: Path, clock: Callable[[], float]) -> None:
        self.policy = Policy.load(base, LoraOptions())
        self._clock = clock
        self._optimizer = torch.optim.AdamW(self.policy.trainable_parameters().values(), lr=RATE)

    def step(self, made: LayoutPlan, targets: TargetSettings, coefficients: torch.Tensor) -> float:
        """Seconds of one step. With one update the ratio is 1, so the loss is coefficient x logprob."""
        start = self._clock()
        for row in made.rows:
            logprobs, _, _ = self.policy.row_logprobs(row, targets)
            weight = coefficients[torch.from_numpy(row.target_numbers)]
            (-(logprobs - logprobs.detach()).exp() * weight).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.policy.trainable_parameters().values(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._clock() - start


class Trl:
    """TRL's GRPOTrainer in a process of its own, one line in and one line out for each step."""

    def __init__(self, python: str, base: Path, threads: int, clock: str, row_tokens: int) -> None:
        command = [python, str(WORKER), str(base), str(threads), clock, str(row_tokens)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self, rows: list[dict[str, list[int]]]) -> float:
        send: IO[str] = self._process.stdin  # type: ignore[assignment]  # both are pipes
        receive: IO[str] = self._process.stdout  # type: ignore[assignment]
        try:
            send.write(json.dumps(rows) + "\n")
            send.flush()
            line = receive.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise SystemExit(f"the TRL process ended with status {self._process.wait()}: its error is above")
        return float(line)

    def close(self) -> None:
        self._process.communicate()


def measure(case: Case, ours: Ours, trl: Trl | None, repeats: int, row_tokens: int) -> dict[str, object]:
    rows = case.rows()
    ids = np.concatenate([row.completion_ids for row in rows]).astype(np.int64)
    ones = np.ones(len(ids))
    targets = TargetSettings(ids, ones, ones, np.zeros(len(ids), np.int64), 0 * ones)
    coefficients = torch.randn(len(ids)) / len(ids)
    plans = {"planner": plan(rows, "auto", row_tokens, ours.policy.shape)}
    for layout in ("call_rows", "leaf_rows"):
        plans[layout] = plan(rows, layout, row_tokens, ours.policy.shape)
    times: dict[str, list[float]] = {name: [] for name in plans} | ({"trl": []} if trl else {})
    whole = case.whole()
    for turn in range(repeats + 1):
        for name, made in plans.items():
            times[name].append(ours.step(made, targets, coefficients))
        if trl:
            times["trl"].append(trl.step(whole))
        if turn == 0:  # a warm-up
            times = {name: [] for name in times}
    seconds = {name: statistics.median(values) for name, values in times.items()}
    flops = plans["planner"].flops
    chosen = plans["planner"].layout
    others = [value for name, value in seconds.items() if name != "planner"]
    return {
        "name": case.name,
        "model": case.model,
        "layout": chosen,
        "tokens": plans["planner"].tokens,
        "plain_tokens": plans["planner"].plain_tokens,
        "flop_ratio": flops["call_rows"] / flops[chosen],
        "time_ratio": seconds["call_rows"] / seconds["planner"],
        "best_other_ratio": min(others) / seconds["planner"],
        "seconds": seconds,
    }


def count(case: Case, ours: Ours, row_tokens: int) -> str:
    """The tokens and FLOPs of call rows beside the planner's, as a row of Markdown; nothing is computed."""
    made = plan(case.rows(), "auto", row_tokens, ours.policy.shape)
    ratio = made.flops["call_rows"] / made.flops[made.layout]
    tokens = f"{made.plain_tokens:,} | {made.tokens:,} | {made.plain_tokens / made.tokens:.2f}"
    return f"| {case.name} | {made.layout} | {tokens} | {ratio:.2f} |"


def show(row: dict[str, object]) -> str:
    seconds: dict[str, float] = row["seconds"]  # type: ignore[assignment]
    columns = " | ".join(
        f"{seconds[name]:.3f}" if name in seconds else "-" for name in ("planner", "call_rows", "leaf_rows", "trl")
    )
    share = row["time_ratio"] / row["flop_ratio"]  # type: ignore[operator]
    return (
        f"| {row['model']} | {row['name']} | {row['layout']} | {columns} | {row['flop_ratio']:.2f} | "
        f"{row['time_ratio']:.2f} | {share:.0%} | {row['best_other_ratio']:.2f} |"
    )


HEADER = """| model | case | layout | planner s | call rows s | leaf rows s | TRL s | FLOP ratio | time ratio | share | best other / ours |
|---|---|---|---|---|---|---|---|---|---|---|"""

COUNTED = """| case | layout | tokens of call rows | tokens computed | ratio | FLOP ratio |
|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed rounds; the first round is a warm-up and not timed"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--row-tokens", type=int, default=4096, help="tokens computed at once, by every column")
    parser.add_argument(
        "--trl-python", help="interpreter of an environment with TRL 1.4.0; none: the column is skipped"
    )
    parser.add_argument("--case", action="append", default=[], help="only the case of this name (repeatable)")
    parser.add_argument("--count", action="store_true", help="count tokens and FLOPs alone; nothing is timed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.trl_python is None and not options.count:
        print("no --trl-python: the TRL column is skipped")
    models = {
        "30M": Model("30M", 8192, 512, 8, 1536, 8, 8),
        "tiny": Model("tiny", 1024, 256, 5, 768, 8, 4),
    }

    def make_trl(base: Path) -> Trl | None:
        if options.trl_python is None:
            return None
        return Trl(options.trl_python, base, options.threads, options.clock, options.row_tokens)

    rows: list[dict[str, object]] = []
    print(COUNTED if options.count else HEADER, flush=True)
    for name, model in models.items():
        mine = [case for case in cases(models, options.case) if case.model == name]
        if not mine:
            continue
        with tempfile.TemporaryDirectory() as folder:
            base = model.write(Path(folder))
            ours = Ours(base, CLOCKS[options.clock])
            if options.count:
                print(*(count(case, ours, options.row_tokens) for case in mine), sep="\n")
                continue
            trl = make_trl(base)
            for case in mine:
                rows.append(measure(case, ours, trl, options.repeats, options.row_tokens))
                print(show(rows[-1]), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            if trl:
                trl.close()


if __name__ == "__main__":
    main()
