"""Which engine samples, on what, and with how much memory: against a scripted nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbook.base.devices import gpus
from offbook.base.errors import ConfigError, install_command
from offbook.base.server_options import EngineOptions
from offbook.server.base_model import BaseModelPath
from offbook.server.sampler import engine_choice as engines
from offbook.server.sampler.engine_choice import choose
from offbook.server.sampler.gpu_sharing import GpuSharing
from offbook.server.sampler.pool import SamplerPool
from tests.server.sampler.cards import GIB, H100, T4


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)


@pytest.fixture
def unplanned(tmp_path: Path) -> str:
    """A base of which no memory plan can be made."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    return str(folder)


def words(model: str = "tiny", **options: object) -> list[str]:
    return choose(EngineOptions.parse(**options), model, trains=True).command(Path("base"), Path("socket"))


def after(flag: str, command: list[str]) -> str | None:
    return command[command.index(flag) + 1] if flag in command else None


def test_without_a_gpu_the_embedded_engine_samples_and_nothing_is_shared() -> None:
    engine = choose(EngineOptions(), "tiny", trains=True)
    assert (engine.name, engine.sharing) == ("embedded", None)


def test_a_gpu_and_vllm_are_vllm_and_the_gpu_is_shared_unless_nothing_trains(driver) -> None:
    driver(H100.format(index=0, free=60 * GIB))
    shared, alone = (choose(EngineOptions(), "tiny", trains=trains).sharing for trains in (True, False))
    assert shared is not None and alone is None
    assert choose(EngineOptions(device="cpu"), "tiny", trains=True).name == "embedded"
    assert choose(EngineOptions(engine="embedded"), "tiny", trains=True).sharing is None


def test_a_gpu_without_vllm_is_the_embedded_engine_and_a_line_that_says_what_to_install(
    driver, without_vllm: None, caplog: pytest.LogCaptureFixture
) -> None:
    driver(H100.format(index=0, free=60 * GIB))
    assert choose(EngineOptions(), "tiny", trains=True).name == "embedded"
    assert install_command("vllm") in caplog.text


def test_without_a_plan_vllm_takes_of_a_shared_gpu_what_is_free_while_the_learner_is_in_host_memory(
    driver, unplanned: str, caplog: pytest.LogCaptureFixture
) -> None:
    driver(H100.format(index=0, free=60 * GIB))
    command = words(unplanned, engine="vllm")
    assert "no memory plan for model_type 'gpt2'" in caplog.text
    assert "--shares-gpu" in command and after("--memory-share", command) == "0.731"  # (60 - 1.5) / 80
    assert after("--max-batch", command) is None
    driver(H100.format(index=0, free=8 * GIB))
    with pytest.raises(ConfigError, match=r"GPU 0 \(NVIDIA H100\) has 8.0 of 80.0 GiB free .* --inference-gpus"):
        words(unplanned, engine="vllm")


def test_gpus_of_their_own_share_nothing_and_one_option_means_both(driver) -> None:
    driver(H100.format(index=0, free=60 * GIB), H100.format(index=1, free=70 * GIB))
    apart = choose(EngineOptions.parse(engine="vllm", inference_gpus="0", train_gpus="1"), "tiny", trains=True)
    assert (apart.sharing, apart.options.inference_gpus, apart.options.train_gpus) == (None, (0,), (1,))
    assert "--memory-share" not in apart.command(Path("base"), Path("socket"))
    together = choose(EngineOptions.parse(engine="vllm", inference_gpus="0,1", tensor_parallel=2), "tiny", trains=True)
    assert together.sharing == GpuSharing("offload") and together.options.train_gpus == (0,)  # a plan is for one GPU
    command = together.command(Path("base"), Path("socket"))
    assert after("--gpus", command) == "0,1" and after("--memory-share", command) == "0.731"  # the fuller one decides


def test_each_inference_gpu_is_a_replica_and_the_one_on_the_learners_gpu_follows_the_memory_layout(
    driver, tmp_path: Path
) -> None:
    driver(*(card.format(index=index, free=14 * GIB) for index, card in enumerate((H100, H100, T4))))
    engine = choose(
        EngineOptions.parse(engine="vllm", inference_gpus="0,1,2", card="13GiB", memory_layout="offload"),
        "tiny",
        trains=True,
    )
    commands = [engine.command(Path("base"), Path("socket"), replica) for replica in engine.replicas]
    assert [after("--gpus", command) for command in commands] == ["0", "1", "2"]
    assert [after("--replica", command) for command in commands] == [None, "1", "2"]
    assert {after("--dtype", command) for command in commands} == {"float16"}  # what all of them compute in
    assert ["--shares-gpu" in command for command in commands] == [True, False, False]
    assert [after("--memory-share", command) is None for command in commands] == [False, True, True]
    assert engine.described() == "vLLM, 3 replicas on GPU 0, 1, 2, training on GPU 0, memory layout offload"
    pool = engine.sampler(BaseModelPath("x", tmp_path, "x"), tmp_path / "sampler.log")
    assert isinstance(pool, SamplerPool)
    assert [member.shares_gpu for member in pool.members] == [True, False, False]


def test_replicas_of_several_gpus_take_them_in_order(driver) -> None:
    driver(*(H100.format(index=index, free=60 * GIB) for index in range(5)))
    options = EngineOptions.parse(engine="vllm", inference_gpus="3,0,1,2", tensor_parallel=2, train_gpus="4")
    engine = choose(options, "tiny", trains=True)
    assert [replica.gpus for replica in engine.replicas] == [(3, 0), (1, 2)]
    assert engine.sharing is None and not any(replica.shares_gpu for replica in engine.replicas)
    assert engine.described() == "vLLM, 2 replicas on GPU 3,0, 1,2, training on GPU 4"
    with pytest.raises(ConfigError, match="--replicas 2: name a GPU for each, such as --inference-gpus 0,1"):
        choose(EngineOptions(engine="vllm", replicas=2), "tiny", trains=True)


def test_replicas_on_a_cpu_share_its_cores_and_memory_and_all_follow_the_memory_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 9)
    engine = choose(EngineOptions(engine="vllm", device="cpu", replicas=2), "tiny", trains=True)
    commands = [engine.command(Path("base"), Path("socket"), replica) for replica in engine.replicas]
    assert all(after("--threads", words) == "4" and after("--replicas", words) == "2" for words in commands)
    assert [replica.shares_gpu for replica in engine.replicas] == [True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference_gpus": "0,1,2", "tensor_parallel": 2}, "1 replicas of 2 GPUs need 2, and 3 are named"),
        ({"inference_gpus": "0,1", "replicas": 3}, "3 replicas of 1 GPUs need 3, and 2 are named"),
        ({"inference_gpus": "0,0"}, "inference_gpus: a GPU is named twice"),
        ({"tensor_parallel": 2}, "tensor_parallel: name the GPUs with inference_gpus"),
        (
            {"engine": "embedded", "inference_gpus": "0,1", "tensor_parallel": 2},
            "tensor_parallel: only vLLM has this option",
        ),
        ({"vllm_url": "http://127.0.0.1:1", "replicas": 2}, "replicas: set it on the command line of the vLLM"),
    ],
)
def test_gpus_that_make_no_whole_replicas_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions.parse(**options)


def test_a_gpu_that_is_not_there_is_named_with_those_that_are(driver) -> None:
    driver(T4.format(index=0, free=15 * GIB))
    with pytest.raises(ConfigError, match=r"--train-gpus: this machine has no GPU 3 \(it has: 0\)"):
        choose(EngineOptions.parse(train_gpus="3"), "tiny", trains=True)


@pytest.mark.parametrize(
    ("shown", "seen"),
    [
        (None, [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-1a2b", [1]),
        ("GPU-0a", [0]),
        ("", []),
        ("-1", []),
        ("0,7,1", [0]),
        ("GPU-", []),
        ("1,1", [1]),
        ("MIG-0a2b", []),
    ],
)
def test_cuda_visible_devices_is_respected_by_index_and_by_uuid(
    driver, monkeypatch: pytest.MonkeyPatch, shown: str | None, seen: list[int]
) -> None:
    driver(H100.format(index=0, free=60 * GIB), H100.format(index=1, free=70 * GIB))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert [gpu.index for gpu in gpus()] == seen


def test_both_sides_are_given_the_first_visible_gpu_and_no_other_may_be_named(
    driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(H100.format(index=0, free=60 * GIB), H100.format(index=1, free=70 * GIB))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a2b")
    engine = choose(EngineOptions(engine="vllm"), "tiny", trains=True)
    assert (engine.options.inference_gpus, engine.options.train_gpus) == ((1,), (1,))
    assert engine.sharing is not None and engine.sharing.gpu is not None and engine.sharing.gpu.total == 80 * 2**30
    assert after("--gpus", engine.command(Path("base"), Path("socket"))) == "1"
    with pytest.raises(ConfigError, match=r"no GPU 0 that CUDA_VISIBLE_DEVICES=GPU-1a2b shows \(it has: 1\)"):
        choose(EngineOptions.parse(engine="vllm", train_gpus="0"), "tiny", trains=True)


def test_a_driver_that_fails_counts_as_none_and_is_logged(driver, caplog: pytest.LogCaptureFixture) -> None:
    for lines, code, logged in (
        (["Failed to initialize NVML"], 9, "nvidia-smi failed"),
        (["no, such, table"], 0, "no usable figures for a GPU"),
    ):
        driver(*lines, code=code)
        assert gpus() == ()
        assert logged in caplog.text


def test_a_gpu_without_a_memory_figure_hides_no_other_gpu(driver, caplog: pytest.LogCaptureFixture) -> None:
    driver("0, NVIDIA GB10, [N/A], [N/A], 12.1, GPU-0f", T4.format(index=1, free=15 * GIB))
    assert [gpu.index for gpu in gpus()] == [1]
    assert "is not used" in caplog.text and "NVIDIA GB10" in caplog.text
    assert choose(EngineOptions(engine="vllm"), "tiny", trains=True).options.inference_gpus == (1,)


def test_what_a_gpu_can_compute_in_is_read_from_its_capability(driver) -> None:
    driver(T4.format(index=0, free=15 * GIB), H100.format(index=1, free=70 * GIB))
    assert [(gpu.has_bfloat16, gpu.free) for gpu in gpus()] == [(False, 15 * 2**30), (True, 70 * 2**30)]
