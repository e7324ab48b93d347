"""The command line that vLLM gets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from offbook.base.errors import ConfigError, install_command
from offbook.engine.inference.vllm.command import Place, arguments, environment, find_place, main, parse
from offbook.tiny import path as tiny_policy


def made(*flags: str, model: Path | None = None, place: Place | None = None) -> list[str]:
    options = parse(["--model", str(model or tiny_policy()), "--served-model-name", "base", "--uds", "/s", *flags])
    return arguments(options, place or find_place(options))


def after(flag: str, words: list[str]) -> str:
    return words[words.index(flag) + 1]


def test_calls_are_sampled_as_they_are_recorded_and_trained() -> None:
    words = made("--device", "cpu")
    assert after("--logprobs-mode", words) == "processed_logprobs"
    assert after("--generation-config", words) == "vllm"
    assert after("--dtype", words) == "float32" and "--enforce-eager" in words
    assert after("--tool-call-parser", words) == "offbook_hermes" and "--enable-auto-tool-choice" in words
    assert (after("--max-loras", words), after("--max-cpu-loras", words)) == ("3", "6")
    assert "--no-trust-remote-code" in words
    assert after("--tokenizer-mode", words) == "hf"  # the learner's tokenizer, also for Mistral


@pytest.mark.parametrize(("rank", "taken"), [("1", "1"), ("9", "16"), ("16", "16"), ("17", "32"), ("257", "320")])
def test_a_rank_is_rounded_up_to_one_that_vllm_knows(rank: str, taken: str) -> None:
    assert after("--max-lora-rank", made("--max-lora-rank", rank)) == taken


def test_engine_args_are_vllms_own_options_and_go_before_ours() -> None:
    given = {"max_num_batched_tokens": 512, "enforce-eager": False, "limit-mm-per-prompt": {"image": 0}, "x": [1, 2]}
    words = made("--engine-args", json.dumps(given), "--device", "cpu")
    assert after("--max-num-batched-tokens", words) == "512"
    assert "--no-enforce-eager" in words and "--enforce-eager" not in words
    assert json.loads(after("--limit-mm-per-prompt", words)) == {"image": 0}
    assert words[words.index("--x") + 1 :][:2] == ["1", "2"]


def test_replicas_and_restarts_sample_with_a_seed_each() -> None:
    seeds = {after("--seed", made("--device", "cpu", "--replica", str(number // 2))) for number in range(6)}
    assert len(seeds) == 6 and all(0 <= int(seed) < 2**31 for seed in seeds)
    own = [made("--engine-args", '{"seed": 40}', "--device", "cpu", "--replica", str(number)) for number in range(3)]
    assert [after("--seed", words) for words in own] == ["40", "41", "42"]
    with pytest.raises(ConfigError, match="seed: a whole number is needed, got 'x'"):
        made("--engine-args", '{"seed": "x"}', "--device", "cpu")


def test_an_engine_arg_that_is_ours_to_say_is_refused_with_the_option_that_says_it() -> None:
    with pytest.raises(ConfigError, match="engine_args: 'max-num-seqs' is not allowed there: --max-batch"):
        made("--engine-args", '{"max_num_seqs": 4}')
    for name in ("no-enable-lora", "config", "chat-template"):
        with pytest.raises(ConfigError, match=f"engine_args: '{name}' is not allowed there"):
            made("--engine-args", json.dumps({name: True}))


def test_on_gpus_it_may_sleep_where_they_are_shared_and_takes_the_share_that_was_measured() -> None:
    place = Place("bfloat16", (2, 3))
    words = made("--shares-gpu", "--memory-share", "0.42", place=place)
    assert "--enable-sleep-mode" in words and after("--gpu-memory-utilization", words) == "0.42"
    assert after("--tensor-parallel-size", words) == "2"
    assert environment(place, None)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert after("--max-model-len", words) == "auto"  # what fits
    assert "--enable-sleep-mode" not in made(place=place)


def test_calls_decoded_together_are_vllms_own_number_on_a_gpu_and_64_on_a_cpu_unless_given() -> None:
    gpu = Place("bfloat16", (0,))
    assert "--max-num-seqs" not in made(place=gpu)
    assert after("--max-num-seqs", made("--max-batch", "7", place=gpu)) == "7"
    assert after("--max-num-seqs", made("--device", "cpu")) == "64"


def test_a_call_may_have_16_stop_strings_as_in_the_embedded_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("bfloat16", (0,))
    assert environment(place, None)["VLLM_MAX_STOP_STRINGS"] == "16"
    monkeypatch.setenv("VLLM_MAX_STOP_STRINGS", "32")
    assert environment(place, None)["VLLM_MAX_STOP_STRINGS"] == "32"


def test_only_on_a_private_socket_are_there_routes_that_put_it_to_sleep() -> None:
    place = Place("bfloat16", (0,))
    modes = [environment(place, None, private=private)["VLLM_SERVER_DEV_MODE"] for private in (True, False)]
    assert modes == ["1", "0"]


def test_on_a_cpu_it_computes_in_one_process_on_all_cores_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = environment(Place("float32", cache_bytes=1), 3)
    assert (variables["VLLM_ENABLE_V1_MULTIPROCESSING"], variables["OMP_NUM_THREADS"]) == ("0", "3")
    for cores, threads in ((1, "1"), (2, "1"), (8, "7")):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 64)
        assert environment(Place("float32", cache_bytes=1), None)["OMP_NUM_THREADS"] == threads
    assert "OMP_NUM_THREADS" not in environment(Place("bfloat16", (0,)), None)


def test_on_a_cpu_the_cache_holds_the_batch_and_one_call_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    # 5 layers of 4 key and value heads of 32 channels in float32 are 5,120 bytes a token.
    config = json.loads((tiny_policy() / "config.json").read_text())
    per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 4
    per_token *= config["hidden_size"] // config["num_attention_heads"]
    words = made("--max-model-len", "200", "--max-batch", "3", "--device", "cpu")
    assert int(after("--kv-cache-memory-bytes", words)) == 4 * 224 * per_token  # blocks of 32 tokens, one call to spare
    shutil.copytree(tiny_policy(), tmp_path / "long")
    (tmp_path / "long" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**9}))
    with pytest.raises(ConfigError, match=r"--max-model-len: one call of 1000000000 tokens takes .* use a shorter"):
        made("--device", "cpu", model=tmp_path / "long")


def test_a_wrong_option_is_one_line_and_exit_code_2(caplog: pytest.LogCaptureFixture) -> None:
    code = main(["--model", str(tiny_policy()), "--served-model-name", "base", "--uds", "/s", "--device", "cuda"])
    assert code == 2
    assert "--device cuda: nvidia-smi shows no GPU on this machine" in caplog.text


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_a_base_that_lacks_a_weight_is_refused_before_vllm_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], require: Callable[[bool, str], None]
) -> None:
    require(find_spec("vllm") is not None, install_command("vllm"))
    folder = Path(shutil.copytree(tiny_policy(), tmp_path / "base"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["--model", str(folder), "--served-model-name", "base", "--uds", "/s", "--device", "cpu"]) == 2
    assert "the files lack weights of Qwen2ForCausalLM" in capfd.readouterr().err
