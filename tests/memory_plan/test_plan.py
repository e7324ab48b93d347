"""What a plan chooses, refuses and says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.memory_plan import main as write_table
from offbook.base.errors import ConfigError
from offbook.base.server_options import EngineOptions, MemoryLayout
from offbook.commands.main import app
from offbook.memory_plan.parts import (
    LAYOUTS,
    Card,
    Workload,
    cache_per_token,
    find_shape,
    parse_card,
    parts,
    published,
    read_shape,
    sampling_parts,
    step_parts,
)
from offbook.memory_plan.plan import (
    CARDS,
    LABELS,
    MIN_ROW,
    make_plan,
    plan_lines,
    remedy,
)
from offbook.tiny import path as tiny_policy
from tests.paths import ROOT

SEVEN, FOURTEEN, THIRTY_TWO = (f"Qwen/Qwen2.5-{size}B-Instruct" for size in (7, 14, 32))


def planned(base: str, card: str, wanted: MemoryLayout | str = "auto", **options: object):
    work = replace(Workload(), **options)
    return make_plan(base, find_shape(base), parse_card(card), work, wanted)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("base", published(), ids=lambda base: base.name)
def test_published_numbers_add_up_to_the_number_of_parameters_that_the_hub_shows(base) -> None:
    assert find_shape(base.name).parameters == base.parameters
    assert base.source == f"https://huggingface.co/{base.name}/blob/main/config.json"


def test_twelve_bases_are_published() -> None:
    assert len({base.name for base in published()}) == 12


def test_7b_fits_on_24_gb_and_14b_on_80_gb_with_what_auto_chooses() -> None:
    assert planned(SEVEN, "24GB").layout == "offload"
    assert planned(FOURTEEN, "80GB").row_tokens >= 8192


@pytest.mark.parametrize("base", published(), ids=lambda base: base.name)
def test_whatever_is_planned_is_below_the_cards_memory_in_both_phases_and_fills_it_with_cache(base) -> None:
    shape = find_shape(base.name)
    for text in CARDS:
        for layout in ("auto", *LAYOUTS):
            card = parse_card(text)
            try:
                plan = make_plan(base.name, shape, card, Workload(), layout)
            except ConfigError:
                continue
            assert max(plan.sampling, plan.step) <= card.memory
            assert MIN_ROW <= plan.row_tokens <= plan.work.row_tokens
            room = card.memory - (plan.sampling - plan.parts.cache)
            token = cache_per_token(shape, plan.work)
            assert plan.cache_tokens * token <= room < (plan.cache_tokens + 1) * token


def test_a_layout_holds_each_side_only_when_it_says_so() -> None:
    held = parts(find_shape(SEVEN), parse_card("24GB"), Workload(), 4096)
    assert set(sampling_parts("side_by_side", held)) == set(step_parts("side_by_side", held)) == set(LABELS)
    assert "cache" not in step_parts("free_cache", held) and "sampler_weights" in step_parts("free_cache", held)
    assert not any(name.startswith("learner") for name in sampling_parts("offload", held))
    assert not any(name.startswith("sampler") for name in step_parts("offload", held))


def test_what_fits_on_a_card_fits_on_every_larger_one() -> None:
    for base in published():
        fits = [remedy_or_none(base.name, text) is None for text in CARDS]
        assert fits == sorted(fits)


def remedy_or_none(base: str, card: str) -> str | None:
    try:
        planned(base, card)
    except ConfigError as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("text", ["16GB", "24GB", "48GB", "80GB"])
@pytest.mark.parametrize("four_bit", [False, True])
def test_a_refusal_names_a_setting_with_which_it_fits(text: str, four_bit: bool) -> None:
    for base in published():
        for wanted in ("auto", "side_by_side"):
            card, shape = parse_card(text), find_shape(base.name)
            work = replace(Workload(), four_bit=four_bit)
            try:
                make_plan(base.name, shape, card, work, wanted)
            except ConfigError as refused:
                change = remedy(shape, card, work, wanted)
                assert str(refused).endswith(f"Take {change}")
                assert f"{base.name} does not fit on {text} with memory layout" in str(refused)
                _follow(change, base.name, card, work)


def _follow(change: str, base: str, card: Card, work: Workload) -> None:
    """Do as the refusal says: then it fits."""
    larger = change.removeprefix("a GPU of ").split(",")[0] if change.startswith("a GPU") else None
    words = change.split() if change.startswith("--") else []
    if "--load-in-4bit" in words:
        work = replace(work, four_bit=True)
    if "--max-batch" in words:
        work = replace(work, max_batch=int(words[words.index("--max-batch") + 1]))
    assert make_plan(base, find_shape(base), parse_card(larger) if larger else card, work)


def test_calls_that_are_asked_for_must_have_room_in_the_cache() -> None:
    with pytest.raises(ConfigError, match=r"Take --max-batch \d+$"):
        planned("Qwen/Qwen3-8B", "24GB", max_batch=64)
    assert planned("Qwen/Qwen3-8B", "24GB", max_batch=8).cache_calls >= 8


def test_one_call_of_the_longest_length_must_have_room_where_it_is_given() -> None:
    with pytest.raises(ConfigError, match=r"Take --max-model-len 16384$"):
        planned("meta-llama/Llama-3.1-8B-Instruct", "24GB", max_model_len=131_072)
    plan = planned("meta-llama/Llama-3.1-8B-Instruct", "24GB", max_model_len=16_384)
    assert plan.cache_tokens >= 16_384
    assert any("--max-model-len 6144" in line for line in plan_lines(plan)) is (plan.row_tokens == 6144)


def test_another_architecture_and_a_config_without_its_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="no memory plan for model_type 'gpt2'; the plan knows llama, mistral"):
        read_shape({"model_type": "gpt2"}, "openai/gpt2")
    with pytest.raises(ConfigError, match=r"mine: its config.json has no usable number for 'num_attention_heads'"):
        read_shape({"model_type": "llama"}, "mine")


def test_a_folder_and_tiny_are_read_from_their_config(tmp_path: Path) -> None:
    assert find_shape("tiny") == find_shape(str(tiny_policy()))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config.json is not a JSON object"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize("text", ["", "24", "0GB", "24 TB", "-3GB"])
def test_a_card_without_a_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--card .*such as 24GB or 79.6GiB"):
        parse_card(text)
    assert (parse_card("24gb").memory, parse_card("1.5 GiB").memory) == (24 * 10**9, 3 * 2**29)


def test_the_options_of_a_server_are_the_workload() -> None:
    options = EngineOptions(max_batch=7, max_lora_rank=32, max_loras=5, load_in_4bit=True, dtype="float32")
    work = Workload.of(options, 4096)
    assert (work.max_batch, work.rank, work.max_loras, work.four_bit, work.bytes_per_value) == (7, 32, 5, True, 4)
    assert (work.row_tokens, Workload.of(options).row_tokens) == (4096, 16_384)


# ---- what is shown


def doctor(*words: str):
    return CliRunner().invoke(app, ["doctor", *words])


def test_the_doctor_plans_for_a_card_that_is_not_here() -> None:
    done = doctor("--model", SEVEN, "--card", "24GB")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == plan_lines(planned(SEVEN, "24GB"))
    assert f"Memory plan: {SEVEN} on 24GB (22.4 GiB): offload" in done.stdout
    for label in LABELS.values():
        assert label in done.stdout


def test_the_doctor_ends_with_1_where_it_does_not_fit_and_names_the_setting() -> None:
    done = doctor("--model", SEVEN, "--card", "16GB")
    assert done.exit_code == 1
    assert "does not fit on 16GB" in done.stdout and "Take a GPU of 24GB" in done.stdout
    data = json.loads(doctor("--model", SEVEN, "--card", "16GB", "--json").stdout)
    assert data[0]["refused"].startswith(SEVEN)


def test_the_doctors_plan_as_json_adds_up() -> None:
    data = json.loads(doctor("--model", "tiny", "--card", "16GB", "--json", "--memory-layout", "offload").stdout)[0]
    plan = planned("tiny", "16GB", "offload")
    assert (sum(data["sampling"].values()), sum(data["step"].values())) == (plan.sampling, plan.step)
    assert (data["layout"], data["host"]) == ("offload", plan.host)


def test_a_card_needs_a_model_and_a_layout_is_one_of_those_that_exist() -> None:
    for words, message in (
        (["--card", "24GB"], "--card needs --model"),
        (
            ["--model", "tiny", "--card", "24GB", "--memory-layout", "half"],
            "--memory-layout 'half' is unknown: use one of auto, side_by_side",
        ),
    ):
        done = doctor(*words)
        assert isinstance(done.exception, ConfigError) and message in str(done.exception)


def test_the_committed_table_is_what_the_command_writes(tmp_path: Path) -> None:
    write_table(["--out", str(tmp_path / "table.md")])
    committed = ROOT / "benchmarks/results/memory_plan.md"
    assert (tmp_path / "table.md").read_text("utf-8") == committed.read_text("utf-8")
