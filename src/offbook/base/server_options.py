"""The options of an engine and of a server: name, default, range and meaning, defined once."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, model_validator

from .config import Name, Options
from .options import Headline

EngineName = Literal["embedded", "vllm"]


MemoryLayout = Literal["side_by_side", "free_cache", "offload"]
"""How sampler and learner share one GPU in a memory plan. side_by_side: both stay on it. free_cache: the sampler frees
its KV cache during a step. offload: the learner is in host memory between steps."""


Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")]


DEFAULT_NAME = "default"
"""Name of the model that a server creates at start, unless `name` is set."""


def _from_json(value: Any) -> Any:
    """Parse a JSON object of the command line, where it is text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def _from_list(value: Any) -> Any:
    """Split a comma-separated list of the command line."""
    if not isinstance(value, str):
        return value
    parts = tuple(part.strip() for part in value.split(",") if part.strip())
    if not parts:
        raise ValueError("nothing is in the list: leave the option out")
    return parts


Gpus = Annotated[tuple[Annotated[int, Field(ge=0, lt=1024)], ...], BeforeValidator(_from_list)]


def _server_url(value: str) -> str:
    """The URL without a trailing slash and without the `/v1` of OpenAI clients."""
    wrong = ValueError("a server's URL is such as http://127.0.0.1:8001")
    try:
        parts, port = urlsplit(value), urlsplit(value).port
    except ValueError as error:
        raise wrong from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise wrong
    if parts.query or parts.fragment or any(mark in value for mark in " ;\\"):
        raise wrong
    if parts.username is not None or parts.password is not None:
        raise ValueError("no name or password in the URL: the key is taken from VLLM_API_KEY")
    return value.rstrip("/").removesuffix("/v1")


def _different(values: tuple[str, ...]) -> tuple[str, ...]:
    twice = sorted({value for value in values if values.count(value) > 1})
    if twice:
        raise ValueError(f"given more than once: {', '.join(twice)}")
    return values


Urls = Annotated[
    tuple[Annotated[str, AfterValidator(_server_url)], ...], AfterValidator(_different), BeforeValidator(_from_list)
]


def _origin(value: str) -> str:
    """The origin as browsers send it: scheme, host and port in lower case."""
    parts = urlsplit(value.rstrip("/").lower())
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path or parts.query or parts.fragment:
        raise ValueError("an origin is such as https://app.example.com or http://localhost:3000")
    return f"{parts.scheme}://{parts.netloc}"


Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_origin)], ...], AfterValidator(_different), BeforeValidator(_from_list)
]


def _viewer_key(value: str) -> str:
    if not value.isascii() or not value.isprintable() or len(value) < 8:
        raise ValueError("a key is printable ASCII of at least 8 characters")
    return value


ViewerKeys = Annotated[
    tuple[Annotated[str, AfterValidator(_viewer_key)], ...], AfterValidator(_different), BeforeValidator(_from_list)
]


OF_VLLM = (
    "tensor_parallel",
    "max_loras",
    "max_lora_rank",
    "tool_call_parser",
    "reasoning_parser",
    "engine_args",
)
"""Options of vLLM only."""


OF_OUR_VLLM = (
    "max_lora_rank",
    "tool_call_parser",
    "reasoning_parser",
    "engine_args",
    "inference_gpus",
    "tensor_parallel",
    "replicas",
    "max_model_len",
    "max_batch",
)
"""Options that a running vLLM server (`vllm_url`) has on its own command line."""


class EngineOptions(Options):
    """Options of the sampler and the learner of one base model."""

    heading = "Engine"

    engine: Headline[Literal["auto", "embedded", "vllm"]] = Field(
        default="auto", description="the inference engine; auto: vllm if it is installed and there is a CUDA device"
    )
    loader: Literal["auto", "peft", "unsloth"] = Field(
        default="auto",
        description="library that loads the learner's base; auto: unsloth if it is installed and there is a CUDA "
        "device, else peft",
    )
    device: Device = Field(
        default="auto", description="torch device of sampler and learner; auto: cuda if there is one, else cpu"
    )
    inference_gpus: Headline[Gpus] = Field(
        default=(), description="GPUs of the sampler, such as 0,1, with a replica on each; None: the learner's"
    )
    tensor_parallel: int = Field(default=1, ge=1, le=64, description="GPUs per replica of vLLM")
    replicas: int | None = Field(
        default=None, ge=1, le=64, description="number of sampler processes; None: one per inference GPU"
    )
    train_gpus: Headline[Gpus] = Field(
        default=(), description="GPUs of the learners, one per learner, such as 4,5; None: the sampler's"
    )
    learners: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="number of learners that compute each step together; None: one per training GPU",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="precision of the base; auto: bfloat16 on cuda (float16 before Ampere), else float32",
    )
    load_in_4bit: bool = Field(default=False, description="load the learner's base in 4 bits (bitsandbytes)")
    max_model_len: Headline[int | None] = Field(
        default=None, ge=16, description="longest prompt plus completion in tokens; None: the model's own"
    )
    max_batch: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="most calls decoded in one batch; None: 64, or the memory plan's number on a GPU",
    )
    max_loras: int = Field(
        default=3, ge=2, le=64, description="adapters in one batch of vLLM: at least max_staleness + 2"
    )
    max_lora_rank: int = Field(default=16, ge=1, le=512, description="largest rank of an adapter in vLLM")
    tool_call_parser: str | None = Field(
        default=None, min_length=1, description="vLLM's parser of tool calls; None: chosen by the model's family"
    )
    reasoning_parser: str | None = Field(
        default=None, min_length=1, description="vLLM's parser of reasoning; None: chosen by the model's family"
    )
    engine_args: Annotated[dict[str, Any], BeforeValidator(_from_json)] = Field(
        default_factory=dict, description='further vLLM arguments as JSON, such as {"max-num-batched-tokens": 8192}'
    )
    vllm_url: Urls = Field(default=(), description="URLs of running vLLM servers, comma-separated")
    memory_layout: Literal["auto", "side_by_side", "free_cache", "offload"] = Field(
        default="auto", description="how sampler and learner share one GPU; auto: the memory plan chooses"
    )
    card: str | None = Field(
        default=None, description="plan memory for a GPU of this size, such as 24GB, instead of the GPU here"
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="CPU threads of each engine process; None: torch's choice; vLLM: all cores but one",
    )
    prompt_date: datetime.date | None = Field(
        default=None,
        description="date for chat templates that write today's into prompts, such as 2026-11-29; None: the day of the "
        "directory's first start",
    )
    deterministic: bool = Field(default=False, description="use torch's deterministic algorithms in the learner")
    keep_tokens: int = Field(
        default=10, ge=0, le=1_000_000, description="keep the token files of this many newest steps; 0: keep none"
    )

    @model_validator(mode="after")
    def _one_engine(self) -> Self:
        if self.vllm_url and self.engine == "embedded":
            raise ValueError("vllm_url: it needs vLLM, but the engine is embedded")
        if self.vllm_url:
            self._refuse(OF_OUR_VLLM, "set it on the command line of the vLLM server that is already running")
            self._refuse(("memory_layout", "card"), "a vLLM server that is already running keeps its memory")
        if self.engine == "embedded":
            self._refuse(OF_VLLM, "only vLLM has this option, but the engine is embedded")
        self._check_gpus()
        return self

    @property
    def team(self) -> int:
        """The number of learners on this machine."""
        return self.learners or len(self.train_gpus) or 1

    @property
    def samplers(self) -> int:
        """The number of sampler processes."""
        return self.replicas or len(self.inference_gpus) // self.tensor_parallel or 1

    def _check_gpus(self) -> None:
        sampling, training = set(self.inference_gpus), set(self.train_gpus)
        for name, gpus in (("inference_gpus", self.inference_gpus), ("train_gpus", self.train_gpus)):
            if len(set(gpus)) < len(gpus):
                raise ValueError(f"{name}: a GPU is named twice (got {gpus})")
        if sampling and len(sampling) != self.samplers * self.tensor_parallel:
            raise ValueError(
                f"inference_gpus: {self.samplers} replicas of {self.tensor_parallel} GPUs need "
                f"{self.samplers * self.tensor_parallel}, and {len(sampling)} are named: change tensor_parallel or "
                "replicas"
            )
        if self.tensor_parallel > 1 and not sampling:
            raise ValueError(f"tensor_parallel: name the GPUs with inference_gpus (got {self.tensor_parallel})")
        if training and self.team != len(training):
            raise ValueError(f"learners: must be the number of train_gpus, {len(training)} (got {self.learners})")
        if len(training) > 1 and not self.vllm_url and (not sampling or sampling & training):
            raise ValueError(
                f"train_gpus: several learners do not share their GPUs with the sampler (got {self.train_gpus}): name "
                "others with inference_gpus"
            )
        if sampling & training and sampling != training:
            raise ValueError("inference_gpus and train_gpus must be the same or have none in common")

    def changed_among(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `names` whose value differs from the default."""
        defaults = type(self).model_construct()
        return tuple(name for name in names if getattr(self, name) != getattr(defaults, name))

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in self.changed_among(names):
            raise ValueError(f"{name}: {why}")


class ServerOptions(Options):
    """Options of `offbook serve`."""

    heading = "Server"

    model: Headline[str] = Field(
        default="tiny", min_length=1, description="base model: `tiny`, `tiny-mcp`, a folder, or a Hugging Face name"
    )
    name: Headline[Name] = Field(
        default=DEFAULT_NAME, description="name of the trainable model that the server creates at start"
    )
    project: Name = Field(default="default", description="project of the model --name")
    host: Headline[str] = Field(default="127.0.0.1", description="address to listen on")
    port: Headline[int] = Field(default=8000, ge=0, le=65535, description="port to listen on; 0: a free one")
    dir: Headline[Path] = Field(default_factory=lambda: default_dir(), description="folder for checkpoints and records")
    durable: bool = Field(
        default=False, description="sync every commit to disk, so that a power loss loses no answered call"
    )
    api_key: Headline[str | None] = Field(
        default=None,
        description="key that clients must send; None: if `host` is not loopback, one is generated and stored in `dir`",
    )
    viewer_keys: ViewerKeys = Field(default=(), description="read-only keys for pages and records, comma-separated")
    engine: EngineOptions = Field(default_factory=EngineOptions)
    wings: dict[str, SerializeAsAny[Options]] = Field(
        default_factory=dict[str, Options], description="options of the installed wings of the server, by their names"
    )
    inference_only: Headline[bool] = Field(
        default=False, description="serve without a learner; train requests are rejected"
    )
    max_body: int = Field(default=32 * 2**20, ge=1024, description="largest request body in bytes")
    allow_origin: Origins = Field(
        default=(), description="origins whose web pages may send requests that change state, comma-separated"
    )
    unclaimed_ttl: float = Field(
        default=7 * 86_400.0,
        gt=0,
        description="seconds after which a recorded call expires, unless a trajectory has claimed it",
    )
    step_timeout: float = Field(
        default=3600.0, gt=0, description="seconds without progress after which a step fails and its learner is stopped"
    )
    parent_pid: int | None = Field(
        default=None, ge=1, description="stop when the process with this id ends (set by LocalBackend)"
    )


def default_dir() -> Path:
    """`OFFBOOK_DIR`, else `./.offbook`, as an absolute path."""
    return Path(os.environ.get("OFFBOOK_DIR") or ".offbook").expanduser().absolute()


def server_folder(folder: Path | None) -> Path:
    """A server's directory as an absolute path. None: the default."""
    return (folder or default_dir()).expanduser().absolute()
