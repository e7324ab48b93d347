"""What a plan chooses, refuses and says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.memory_plan import main as write_table
from offbook.base.errors import ConfigError
from offbook.base.server_options import EngineOptions, MemoryLayout
from offbook.commands.main import app
from offbook.memory_plan.parts import (
    LAYOUTS,
    BaseShape,
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
    CardsPlan,
    cards_lines,
    cards_remedy,
    make_plan,
    parse_cards,
    plan_cards,
    plan_lines,
    remedy,
    splits,
)
from offbook.tiny import path as tiny_policy
from tests.paths import ROOT

SEVEN, FOURTEEN, THIRTY_TWO = (f"Qwen/Qwen2.5-{size}B-Instruct" for size in (7, 14, 32))


def planned(base: str, card: str, wanted: MemoryLayout | str = "auto", **options: object):
    work = replace(Workload(), **options)
    return make_plan(base, find_shape(base), parse_card(card), work, wanted)  # pyright: ignore[reportArgumentType]


def divided(base: str, card: str, count: int, *, trains: bool = True) -> CardsPlan:
    return plan_cards(base, find_shape(base), parse_card(card), count, Workload(), trains=trains)


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


@pytest.mark.parametrize("text", ["24GB", "80GB"])
def test_several_cards_are_used_up_by_replicas_and_learners_that_fit_or_the_change_that_is_named_fits(
    text: str,
) -> None:
    for base, count in product(published(), (2, 4, 8)):
        shape, card = find_shape(base.name), parse_card(text)
        try:
            plan = divided(base.name, text, count)
        except ConfigError as refused:
            change = cards_remedy(shape, card, count, Workload())
            assert str(refused).endswith(f"Take {change}")
            assert follow(change, shape, card, count)
            continue
        assert plan.replicas * plan.tensor_parallel + plan.learners == count and plan.learners >= max(1, count // 4)
        assert sum(plan.learner.values()) <= card.memory and MIN_ROW <= plan.row_tokens <= 16_384
        assert shape.heads % plan.tensor_parallel == 0
        cached = plan.cache_tokens * cache_per_token(shape, Workload()) // plan.tensor_parallel
        assert sum(plan.replica.values()) - plan.replica["cache"] + cached <= 0.92 * card.memory
        assert plan.cache_calls >= 8


def follow(change: str, shape: BaseShape, card: Card, count: int) -> bool:
    """Whether the base fits after the change."""
    work = replace(
        Workload(), four_bit="--load-in-4bit" in change, max_batch=32 if "--max-batch 32" in change else None
    )
    if change[0].isdigit():
        count, card = parse_cards(change.split(" ")[0])
    return plan_cards("", shape, card, count, work).learners > 0


@pytest.mark.parametrize("base", [SEVEN, "Qwen/Qwen3-8B", FOURTEEN, THIRTY_TWO])
def test_the_page_of_scaling_has_the_divisions_that_are_planned(base: str) -> None:
    cells = [described(base, card, count) for card, count in product(("24GB", "80GB"), (4, 8))]
    name = base.partition("/")[2].removesuffix("-Instruct")
    assert f"| {name} | {' | '.join(cells)} |\n" in (ROOT / "docs/scaling.md").read_text("utf-8")


def described(base: str, card: str, count: int) -> str:
    try:
        plan = divided(base, card, count)
    except ConfigError as refused:
        return "`--load-in-4bit`" if str(refused).endswith("Take --load-in-4bit") else "no"
    split = {1: "", 2: " on two cards", 4: " on four cards"}[plan.tensor_parallel]
    return f"{plan.replicas}{split} + {plan.learners}"


def test_a_division_of_32b_over_80_gb_cards_has_the_bytes_that_were_counted_by_hand() -> None:
    plan = divided(THIRTY_TWO, "80GB", 8)
    weights = 32_763_876_352 * 2
    assert (plan.replica["sampler_weights"], plan.learner["learner_weights"]) == (weights // 2, weights)
    assert (
        plan.replica["cache"] == 8 * 2048 * 64 * 2 * 8 * 128 * 2 // 2
    )  # 8 calls; layers, keys and values, heads, width, bytes
    served = divided(THIRTY_TWO, "80GB", 8, trains=False)
    assert (served.replicas, served.learners, served.learner) == (4, 0, {})
    assert served.options() == "--inference-gpus 0,1,2,3,4,5,6,7 --tensor-parallel 2"


def test_a_replica_is_split_only_over_what_divides_its_heads() -> None:
    shape = find_shape(SEVEN)  # 28 heads, 4 of keys and values
    assert list(splits(shape, 8)) == [1, 2, 4]
    assert list(splits(replace(shape, heads=32, kv_heads=2), 8)) == [1, 2, 4, 8]


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


def test_the_doctor_plans_replicas_and_learners_for_several_cards_and_names_the_options() -> None:
    done = doctor("--model", THIRTY_TWO, "--cards", "8x80GB")
    plan = divided(THIRTY_TWO, "80GB", 8)
    assert done.exit_code == 0 and done.stdout.splitlines() == cards_lines(plan)
    assert (
        "--inference-gpus 0,1,2,3,4,5 --tensor-parallel 2 --train-gpus 6,7\n  3 replicas, each on 2 cards"
        in done.stdout
    )
    data = json.loads(doctor("--model", THIRTY_TWO, "--cards", "8x80GB", "--json").stdout)[0]
    assert (data["replicas"], data["tensor_parallel"], data["learners"]) == (3, 2, 2)
    assert sum(data["learner"].values()) <= data["memory"] and data["options"] == plan.options()
    one, same = doctor("--model", SEVEN, "--cards", "1x24GB"), doctor("--model", SEVEN, "--card", "24GB")
    assert one.stdout == same.stdout
    for base, cards, message in (
        (FOURTEEN, "4x24GB", "a learner needs"),
        (THIRTY_TWO, "4x24GB", "Take 4x48GB"),
    ):
        refused = doctor("--model", base, "--cards", cards)
        assert refused.exit_code == 1 and message in refused.stdout, refused.stdout


def test_a_card_needs_a_model_and_a_layout_is_one_of_those_that_exist() -> None:
    for words, message in (
        (["--card", "24GB"], "--card needs --model"),
        (["--cards", "2x24GB"], "--cards needs --model"),
        (
            ["--model", "tiny", "--cards", "24GB"],
            "--cards '24GB': give a number up to 64 and a GPU's memory, such as 8x80GB",
        ),
        (["--model", "tiny", "--cards", "0x24GB"], "--cards '0x24GB': give a number"),
        (["--model", "tiny", "--cards", "2x24GB", "--card", "24GB"], "--card is for one GPU, --cards for several"),
        (
            ["--model", "tiny", "--cards", "2x24GB", "--memory-layout", "offload"],
            "--memory-layout offload: with several",
        ),
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
