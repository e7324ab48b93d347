"""The server follows the memory plan: what it starts for a shared GPU, what it refuses, and what an option forces."""

from __future__ import annotations

import json
import logging
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from offbook.base.errors import ConfigError
from offbook.base.server_options import EngineOptions, MemoryLayout
from offbook.engine.inference.vllm.command import Place, arguments
from offbook.engine.inference.vllm.command import parse as parse_vllm
from offbook.memory_plan.parts import Card, Workload, find_shape
from offbook.memory_plan.plan import MemoryPlan, make_plan
from offbook.server.__main__ import main
from offbook.server.sampler import gpu_sharing
from offbook.server.sampler.engine_choice import EngineChoice, choose
from offbook.server.sampler.gpu_sharing import GpuSharing
from offbook.tiny import path as tiny_policy
from tests.server.sampler.cards import GIB, H100, L4

SMALL, SEVEN, EIGHT = "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B"
IDLE_L4, IDLE_H100 = L4.format(index=0, free=22_600), H100.format(index=0, free=81_440)
MIB = 2**20


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with 128 GiB of free host memory."""
    memory = SimpleNamespace(available=128 * 2**30)
    monkeypatch.setattr(gpu_sharing.psutil, "virtual_memory", lambda: memory)
    return memory


def chosen(model: str, **options: object) -> EngineChoice:
    return choose(EngineOptions.parse(**{"engine": "vllm", **options}), model, trains=True)


def plan_of(engine: EngineChoice) -> MemoryPlan:
    assert engine.sharing is not None and engine.sharing.plan is not None
    return engine.sharing.plan


def command(engine: EngineChoice) -> list[str]:
    return engine.command(Path("base"), Path("socket"))


def after(flag: str, words: list[str]) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


# ---- the plan is made, logged and followed


@pytest.mark.parametrize(
    ("model", "card", "layout"),
    [
        (SMALL, IDLE_L4, "side_by_side"),
        ("Qwen/Qwen2.5-14B-Instruct", IDLE_H100, "free_cache"),
        (SEVEN, IDLE_L4, "offload"),
    ],
)
def test_the_plan_of_the_card_that_is_here_is_logged_and_its_layout_taken(
    driver, caplog: pytest.LogCaptureFixture, model: str, card: str, layout: MemoryLayout
) -> None:
    driver(card)
    with caplog.at_level(logging.INFO):
        engine = chosen(model)
    total = int(card.split(",")[2]) * MIB
    expected = make_plan(model, find_shape(model), Card(card.split(",")[1].strip(), total), Workload())
    assert plan_of(engine) == expected and expected.layout == layout
    assert f"Memory plan: {model} on {expected.card.name}" in caplog.text and f"): {layout}" in caplog.text
    assert f"memory layout {layout}" in engine.described()


@pytest.mark.parametrize("model", [SMALL, SEVEN])
def test_vllm_gets_what_the_learners_side_leaves_and_as_many_calls_as_the_cache_holds(driver, model: str) -> None:
    driver(IDLE_L4)
    engine = chosen(model)
    plan, words = plan_of(engine), command(engine)
    share = float(after("--memory-share", words) or 0)
    beside = plan.parts.contexts
    if plan.layout == "side_by_side":
        beside += plan.parts.learner_state + plan.parts.learner_gradients + plan.parts.learner_activations
    assert 0 <= (23_034 * MIB - beside) / (23_034 * MIB) - share < 0.001
    # vLLM's part by the plan, its cache filled: it takes no more than it is given
    vllm = plan.parts.sampler_weights + plan.parts.sampler_adapters + plan.parts.sampler_activations
    cache = plan.cache_tokens * 2 * plan.shape.layers * plan.shape.kv_width * 2
    assert vllm + plan.parts.cuda_graphs + cache <= plan.sampler < vllm + plan.parts.cuda_graphs + cache + 10**6
    assert after("--max-batch", words) == str(plan.decoded_calls)
    assert plan.decoded_calls == min(256, plan.cache_tokens // 512)
    assert ("--shares-gpu" in words) is (plan.layout == "offload")  # sleep is switched on where it is used


def test_an_option_that_is_given_stands_before_the_plan(driver) -> None:
    driver(IDLE_L4)
    words = command(chosen(SEVEN, max_batch=12, engine_args='{"gpu_memory_utilization": 0.5}'))
    assert after("--max-batch", words) == "12"
    options = parse_vllm(words[words.index("--model") :])
    options.model = tiny_policy()
    vllm = arguments(options, Place("bfloat16", (0,)))
    assert (after("--gpu-memory-utilization", vllm), after("--max-num-seqs", vllm)) == ("0.5", "12")


def test_what_the_plan_gives_arrives_on_vllms_command_line(driver) -> None:
    driver(IDLE_L4)
    engine = chosen(SEVEN)
    words = command(engine)
    options = parse_vllm(words[words.index("--model") :])
    options.model = tiny_policy()
    vllm = arguments(options, Place("bfloat16", (0,)))
    assert after("--gpu-memory-utilization", vllm) == after("--memory-share", words) == "0.933"
    assert after("--max-num-seqs", vllm) == str(plan_of(engine).decoded_calls)
    assert "--enable-sleep-mode" in vllm


def test_a_card_that_is_given_bounds_what_is_taken_of_a_larger_one(driver) -> None:
    driver(IDLE_H100)
    engine = chosen(SEVEN, card="24GB")
    assert plan_of(engine).layout == "offload"
    share = float(after("--memory-share", command(engine)) or 0)
    assert share * 81_920 * MIB < 24 * 10**9 - plan_of(engine).parts.contexts
    with pytest.raises(ConfigError, match=r"--card 141GB: GPU 0 \(NVIDIA H100\) has only 80.0 GiB"):
        chosen(SEVEN, card="141GB")


# ---- refusals


def test_a_base_that_does_not_fit_is_refused_with_the_setting_to_change(driver) -> None:
    driver(IDLE_L4)
    with pytest.raises(
        ConfigError,
        match=r"^Qwen/Qwen3-8B does not fit on NVIDIA L4 with memory layout offload: .* GiB\. Take --max-batch \d+$",
    ):
        chosen(EIGHT, max_batch=64)
    with pytest.raises(ConfigError, match=r"with memory layout side_by_side: .* Take --memory-layout auto$"):
        chosen(SEVEN, memory_layout="side_by_side")


def test_memory_that_other_programs_hold_is_not_planned_with_and_is_named(driver) -> None:
    driver(L4.format(index=0, free=23_034 - 12 * GIB))
    with pytest.raises(
        ConfigError,
        match=r"of 11.0 GiB \(11.5 more are held by other programs\)\. Take the whole of NVIDIA L4: end the other programs",
    ):
        chosen(SEVEN)
    engine = chosen(SMALL)
    plan = plan_of(engine)
    assert max(plan.sampling, plan.step) <= plan.card.usable < 12 * 2**30
    assert float(after("--memory-share", command(engine)) or 1) * plan.card.memory <= plan.card.usable


def test_vllm_gets_less_than_planned_where_a_little_less_is_free_when_it_starts(
    driver, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM refuses to start with a share of which not all is free: once the learner has loaded, the driver is asked again."""
    driver(IDLE_H100)
    engine = chosen("Qwen/Qwen2.5-14B-Instruct", memory_layout="free_cache")
    plan, total = plan_of(engine), 81_920 * MIB
    needed = plan.sampler // MIB + 512  # with vLLM's own CUDA context
    shares = []
    for lacking in (-100, 700, 30_000):
        driver(H100.format(index=0, free=needed - lacking))
        shares.append(float(after("--memory-share", command(engine)) or 0))
    assert shares[0] == shares[2] and 0 <= plan.sampler / total - shares[0] < 0.001
    assert 0 <= (plan.sampler - 700 * MIB) / total - shares[1] < 0.0011
    assert "0.68 GiB less are free than planned" in caplog.text


def test_what_a_display_holds_is_not_planned_with(driver) -> None:
    """Below a GiB too: 434 MiB are the driver's own, 600 more a display's."""
    driver(L4.format(index=0, free=22_600 - 600))
    plan = plan_of(chosen(SMALL))
    assert plan.card.taken == (434 + 600 - 512) * MIB
    assert max(plan.sampling, plan.step) <= plan.card.usable


def test_host_memory_that_is_too_small_for_the_layout_is_refused(driver, host: SimpleNamespace) -> None:
    driver(IDLE_L4)
    host.available = 16 * 2**30
    with pytest.raises(
        ConfigError,
        match=r"layout offload needs 32.0 GiB of host memory, and 16.0 GiB are free: use --load-in-4bit, a machine",
    ):
        chosen(SEVEN)
    assert plan_of(chosen(SMALL)).layout == "side_by_side"


def test_a_refused_start_is_one_line_and_exit_code_2_before_a_weight_is_read(
    tmp_path: Path, driver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver(IDLE_L4)
    base = tmp_path / "huge"
    base.mkdir()
    config = json.loads((tiny_policy() / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"hidden_size": 8192, "num_hidden_layers": 80}))
    words = ["--model", str(base), "--dir", str(tmp_path / "dir"), "--port", "0", "--engine", "vllm"]
    assert main(words) == 2  # the folder has no weights: nobody has looked yet
    error = capsys.readouterr().err
    assert error.startswith(f"offbook: {base} does not fit on NVIDIA L4 with memory layout offload: ")
    assert ". Take " in error and len(error.splitlines()) == 1


# ---- without a GPU


def test_on_a_cpu_nothing_is_planned_unless_an_option_asks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    engine = chosen("tiny")
    assert engine.sharing is None and "--memory-share" not in command(engine)
    assert chosen("tiny", memory_layout="offload").sharing == GpuSharing("offload")
    assert chosen("tiny", engine="embedded", memory_layout="offload").sharing == GpuSharing("offload")
    forced = chosen("tiny", card="24GB")
    assert (plan_of(forced).layout, forced.sharing and forced.sharing.gpu) == ("side_by_side", None)
    with pytest.raises(ConfigError, match=r"^Qwen/Qwen2.5-7B-Instruct does not fit on 16GB .* Take a GPU of 24GB"):
        chosen(SEVEN, card="16GB")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"memory_layout": "free_cache"},
            "only vLLM on a GPU can release its key-value cache; use offload or side_by_side",
        ),
        ({"engine": "embedded", "card": "24GB"}, "use --engine vllm, or leave out --card"),
        ({"card": "24"}, "--card '24' is not a size: give the GPU's memory, such as 24GB"),
    ],
)
def test_what_cannot_be_forced_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chosen("tiny", **options)
    assert message in str(refused.value)


def test_a_vllm_that_runs_already_and_gpus_of_their_own_have_no_layout(
    driver, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="memory_layout: a vLLM server that is already running keeps its memory"):
        EngineOptions.parse(vllm_url="http://127.0.0.1:8001", memory_layout="offload")
    driver(IDLE_H100, H100.format(index=1, free=81_000))
    apart = chosen("tiny", inference_gpus="0", train_gpus="1", memory_layout="offload")
    assert apart.sharing is None and "memory_layout: ignored" in caplog.text


# ---- a step


class CountedCalls:
    """Calls that note how they are put aside."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @asynccontextmanager
    async def asleep(self, *, keep_weights: bool = False):
        self.told.append("cache" if keep_weights else "all")
        yield


@pytest.mark.parametrize(
    ("layout", "told"), [("side_by_side", []), ("free_cache", ["cache"]), ("offload", ["all"]), (None, [])]
)
async def test_a_step_has_of_the_gpu_what_the_layout_says(layout: MemoryLayout | None, told: list[str]) -> None:
    sharing = GpuSharing(layout) if layout is not None else None
    for name in ("vllm", "embedded"):
        calls = CountedCalls()
        async with EngineChoice(name, EngineOptions(), sharing).free_gpu(calls):  # type: ignore[arg-type]
            assert calls.told == (told if name == "vllm" else [])
