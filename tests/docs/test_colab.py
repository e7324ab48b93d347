"""The plan of a free Colab in docs/one_gpu.md is the plan that is computed."""

from __future__ import annotations

import pytest

from offbook.memory_plan.parts import GIB, Workload, find_shape, parse_card
from offbook.memory_plan.plan import make_plan
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("base", "four_bit"), [("Qwen/Qwen2.5-0.5B-Instruct", False), ("Qwen/Qwen2.5-3B-Instruct", True)]
)
def test_the_plan_of_a_free_colab_is_the_computed_one(base: str, four_bit: bool) -> None:
    plan = make_plan(base, find_shape(base), parse_card("15GiB"), Workload(four_bit=four_bit))
    name = f"{base}, `--load-in-4bit`" if four_bit else base
    memory = f"{plan.sampling / GIB:.1f} / {plan.step / GIB:.1f} GiB | {plan.host / GIB:.1f} GiB"
    line = f"| {name} | `{plan.layout}` | {plan.row_tokens:,} | {plan.cache_calls:,} | {memory} |"
    assert line in (ROOT / "docs/one_gpu.md").read_text("utf-8")
    assert plan.host < 12.7e9
