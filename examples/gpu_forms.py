"""What each example's form for a GPU would take: `python gpu_forms.py --price 2.5`, in the folder `examples`.

Nothing here is measured. A step samples its rollouts, then trains on every token that they read or wrote:

    writing:  tokens * bytes of the weights / (memory bandwidth * calls at once * 0.5)
    reading:  tokens * 2 * parameters / (peak * 0.4)
    training: tokens * 8 * parameters / (peak * 0.2)     forward, recomputation and backward through the base

and 20 s for what does not depend on tokens. 0.5, 0.4 and 0.2 are the shares of the card's peak that we assume, for an
NVIDIA H100 in bfloat16. Prefixes that calls share are counted each time, so the estimate is high for long conversations."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from offbook.memory_plan.parts import find_shape

PEAK, BANDWIDTH = 989e12, 3.35e12
"""Operations and bytes a second of an H100 (its data sheet: dense bfloat16, HBM3)."""
SECONDS_A_STEP = 20.0
PRICE = 2.5  # USD per hour, assumed


@dataclass(frozen=True)
class GpuForm:
    """`calls` of a rollout; `read` and `written`: tokens of a call; `runs`: how often `steps` are made at most."""

    example: str
    base: str
    options: str
    steps: int
    rollouts: int  # of a step
    calls: float
    read: int
    written: int
    runs: int = 1

    @property
    def command(self) -> str:
        return f"python -m {self.example}.train --base-model {self.base} --rate 1e-5 --steps {self.steps} {self.options}".rstrip()

    def hours(self) -> float:
        """By the formulas above."""
        parameters = find_shape(self.base).parameters
        calls = self.rollouts * self.calls
        writing = calls * self.written * 2 * parameters / (BANDWIDTH * min(self.rollouts, 64) * 0.5)
        reading = calls * self.read * 2 * parameters / (PEAK * 0.4)
        training = calls * (self.read + self.written) * 8 * parameters / (PEAK * 0.2)
        return self.runs * self.steps * (SECONDS_A_STEP + writing + reading + training) / 3600


SMALL, MIDDLE, LARGE = (f"Qwen/Qwen2.5-{size}B-Instruct" for size in ("1.5", "3", "7"))
FORMS = (
    GpuForm("guess_number", SMALL, "", 50, 128, 2.6, 60, 2),
    GpuForm("tic_tac_toe", MIDDLE, "--opponent perfect", 100, 128, 4, 50, 3),
    GpuForm("game_2048", MIDDLE, "--size 4", 100, 128, 200, 90, 3),
    GpuForm("codenames", MIDDLE, "--form board", 100, 96, 4, 140, 6),
    GpuForm("temporal_clue", LARGE, "--form clues", 100, 96, 1, 450, 400),
    GpuForm("any_game", MIDDLE, "--game Nim-v0", 100, 128, 4, 500, 60),
    GpuForm("supervisor_agent", MIDDLE, "", 50, 96, 3, 300, 40),
    GpuForm("customer_service", MIDDLE, "", 50, 64, 5, 450, 40),
    GpuForm("existing_server", SMALL, "--url http://gpu-box:8000", 30, 96, 1, 50, 2),
    GpuForm("observe_and_improve", MIDDLE, "", 30, 32, 2, 300, 40, runs=2),
    GpuForm("auto_rl", SMALL, "", 40, 64, 1, 250, 40),
    GpuForm("mcp_rl", MIDDLE, "", 50, 96, 2, 300, 40),
    GpuForm("langgraph_email_agent", LARGE, "--kl 0", 50, 64, 5, 900, 80),
)


def table(price: float = PRICE) -> list[str]:
    rows = ["| example | command | hours | USD |", "|---|---|---|---|"]
    for form in FORMS:
        hours = form.hours()
        rows.append(f"| {form.example} | `{form.command}` | {hours:.1f} | {hours * price:.1f} |")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print hours and price of the GPU forms.")
    parser.add_argument("--price", type=float, default=PRICE, help="USD per hour of the machine")
    print("\n".join(table(parser.parse_args().price)))
