"""What the server knows of the engine: how to start its processes, and the commands, jobs and events of the learner.

The sampler speaks vLLM's HTTP dialect and needs no types here. The learner reads one command per line on stdin and
writes one event per line on its original stdout (everything else it prints goes to stderr). Token arrays travel in a
job directory: `job.json` and `tokens.safetensors`. No torch in this module.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationInfo
from safetensors.numpy import load_file, save  # pyright: ignore[reportUnknownVariableType]  # safetensors leaves the paths it takes open

from offbook.base.config import LoraOptions, TrainConfig
from offbook.base.server_options import EngineName
from offbook.base.types import RenderedHistory, Sampling, TrainResult

Number = TypeVar("Number", bound=np.generic)

SAMPLER_MODULES: dict[EngineName, str] = {
    "embedded": "offbook.engine.inference.embedded",
    "vllm": "offbook.engine.inference.vllm.command",
}
"""python -m SAMPLER_MODULES[engine] --model DIR --served-model-name NAME --uds SOCKET --device D --dtype T
[--max-model-len N] [--max-batch N] [--threads N] [--prompt-date DATE] [--parent-pid PID], and for each the options of its own."""
FLAT_LOGPROBS = "flat_logprobs"
"""In the `vllm_xargs` of a call: vLLM with our plugin answers `logprobs.token_logprobs`, a list, instead of `content`."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's error code: the prompt, or the prompt and the tokens that were asked for, exceed the context."""
UNKNOWN_LOGPROB = -9999.0
"""vLLM's word for a logprob that JSON cannot hold, also the embedded engine's; none that is known is so small."""
LEARNER_MODULE = "offbook.engine.learner"
"""python -m LEARNER_MODULE --base DIR --loader auto|peft|unsloth [--load-in-4bit] --device D --dtype T [--threads N] [--deterministic]
[--offload] [--row-limit N] [--prompt-date DATE] [--learners N]"""

MERGE_MODULE = "offbook.engine.learner.model.merge"
"""python -m MERGE_MODULE --base DIR --adapter DIR --output DIR [--gguf]: one merge, where no learner runs. A Merged on stdout."""


IMPORT_MODULE = "offbook.engine.learner.import_adapter"
"""python -m IMPORT_MODULE with folders: writes step 1 of a model, or why not on stdout."""


def add_prompt_date(parser: argparse.ArgumentParser) -> None:
    """Add --prompt-date to a process of the engine: what a chat template that asks for today's date gets."""
    parser.add_argument("--prompt-date", type=datetime.date.fromisoformat, help="for chat templates (default: today)")


def sampler_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of the options that the processes of `SAMPLER_MODULES` share."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--served-model-name", required=True, help="the base model's name in requests")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 selects a free port (see the log)")
    parser.add_argument("--uds", help="Unix socket to listen on, instead of host and port")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N, or mps (not vLLM)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus completion in tokens")
    parser.add_argument("--threads", type=int, help="CPU threads of the model")
    parser.add_argument("--parent-pid", type=int, help="exit when this process ends")
    add_prompt_date(parser)
    return parser


def prompt_date_words(date: datetime.date | None) -> list[str]:
    """The words of a command line for --prompt-date."""
    return ["--prompt-date", date.isoformat()] if date is not None else []


class Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


# ---- commands: server -> learner


class TrainCommand(Line):
    """Apply the job at `job` to the model whose checkpoints are in `checkpoints`, going from `step` to `step + 1`.
    `keep_tokens`: for how many of the newest steps token files are kept; 0: none is written. `teacher`: the checkpoint of
    the teacher that the job's config names; None: the base, or the model itself."""

    kind: Literal["train"] = "train"
    request_id: str
    model: str
    job: Path
    checkpoints: Path
    step: int
    lora: LoraOptions
    keep_tokens: int = Field(default=0, ge=0)
    teacher: Path | None = None


class MergeCommand(Line):
    """Write base plus adapter as one plain model folder at `output`; `gguf`: for llama.cpp's converter."""

    kind: Literal["merge"] = "merge"
    request_id: str
    adapter: Path
    output: Path
    gguf: bool = False


class ScoreCommand(Line):
    """Compute the logprobs of a completion under the base, at `temperature`."""

    kind: Literal["score"] = "score"
    request_id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...] = Field(min_length=1)
    temperature: float = 1.0


class StopCommand(Line):
    kind: Literal["stop"] = "stop"


Command = Annotated[TrainCommand | MergeCommand | ScoreCommand | StopCommand, Field(discriminator="kind")]
COMMANDS: TypeAdapter[Command] = TypeAdapter(Command)


# ---- events: learner -> server


class Ready(Line):
    """The base is loaded. `facts` are shown by doctor: device, dtype, loader, parameters, mask probe, chat template.
    `linear_layers`: the names of the base's layers that an adapter can have."""

    kind: Literal["ready"] = "ready"
    facts: dict[str, str]
    linear_layers: tuple[str, ...] = ()


class Progressed(Line):
    kind: Literal["progress"] = "progress"
    request_id: str
    phase: str  # plan, old_logprobs, update, evaluate, save
    done: int
    total: int


class Warned(Line):
    kind: Literal["warning"] = "warning"
    request_id: str
    message: str


class Trained(Line):
    """The step was applied (checkpoint `result.step` exists), had no signal, or was only evaluated (`result.applied` is
    False)."""

    kind: Literal["trained"] = "trained"
    request_id: str
    result: TrainResult


class Merged(Line):
    """The folder exists and was loaded once. `adapter_kept`: correlation of the weights' change with the adapter, which
    rounding lowers; `note`: the sentence for users about both."""

    kind: Literal["merged"] = "merged"
    request_id: str
    path: Path
    adapter_kept: float
    note: str


class CompletionScored(Line):
    """`logprobs`: of each token of the completion, in nats."""

    kind: Literal["scored"] = "scored"
    request_id: str
    logprobs: tuple[float, ...]


class Failed(Line):
    """The command was not applied; state is that of the last checkpoint. `reason`: bad_job, no_scored_groups,
    nan_gradient, out_of_memory, disk_full, failed."""

    kind: Literal["failed"] = "failed"
    request_id: str
    reason: str
    message: str


LastEvent = Trained | Merged | CompletionScored | Failed
"""The last event of a command."""
Event = Annotated[Ready | Progressed | Warned | LastEvent, Field(discriminator="kind")]
EVENTS: TypeAdapter[Event] = TypeAdapter(Event)


# ---- jobs


class _Unread:
    """An array of `tokens.safetensors` that is read from its start, one sample after the other."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values
        self._start = 0

    def take(self, count: int) -> NDArray[Any]:
        """The next `count` values."""
        self._start += count
        return self._values[self._start - count : self._start]


def _taken(count: object, info: ValidationInfo[dict[str, _Unread]]) -> NDArray[Any]:
    if not isinstance(count, int) or info.field_name is None:
        raise ValueError(f"the length of an array is {count!r}")
    return info.context[info.field_name].take(count)


_BY_LENGTH = (PlainValidator(_taken), PlainSerializer(len, return_type=int))
"""`job.json` has the length of an array; its values are in `tokens.safetensors`, under the name of the field."""


@dataclass(frozen=True)
class Sample:
    """One sampled completion: a choice of a recorded call. The learner calls it a call; most have one choice.

    prompt_ids int32 [P]; completion_ids int32 [C]; logprobs float32 [C], NaN where the engine gave none.
    `constrained` says why recorded logprobs are not the policy's, else None. `allowed_texts`: nothing but a list of these
    texts constrained the answer. `weight` scales the advantage of its tokens; 0
    leaves it out of training. `earned_before`: how many of its trajectory's `call_rewards` belong to earlier calls.
    `offset`: in a TrainBatch, sampled token j is target number `offset + j` of the step.
    """

    call_id: str
    index: int
    prompt_ids: Annotated[NDArray[np.int32], *_BY_LENGTH]
    completion_ids: Annotated[NDArray[np.int32], *_BY_LENGTH]
    logprobs: Annotated[NDArray[np.float32], *_BY_LENGTH]
    sampling: Sampling
    step: int
    constrained: str | None = None
    allowed_texts: tuple[str, ...] = ()
    tool_call: bool = False  # the answer held a parsed tool call
    parse_failure: bool = False  # the answer looked like a tool call and was none
    cut_off: bool = False  # the answer ended at a limit of tokens
    weight: float = 1.0
    unused: bool = False  # the app threw the answer away
    earned_before: int = 0
    offset: int = 0

    @classmethod
    def bare(cls, prompt_ids: NDArray[np.int32], completion_ids: NDArray[np.int32], offset: int = 0) -> Sample:
        """Tokens alone, at temperature 1 and without recorded logprobs: for probes and measurements."""
        missing = np.full(len(completion_ids), np.nan, np.float32)
        return cls("", 0, prompt_ids, completion_ids, missing, Sampling(), 0, offset=offset)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class JobTrajectory:
    """`reward=None`: unscored. `histories` are rendered by the learner with the base's chat template. `left_out`: calls
    that are no samples, because they were cancelled, failed, came late or sampled nothing. `call_rewards`: the parts of
    the reward that were earned after calls, in the order of the calls. `replayed`: it was trained before."""

    id: str
    reward: float | None
    samples: tuple[Sample, ...]
    histories: tuple[RenderedHistory, ...] = ()
    failed: bool = False
    left_out: int = 0
    call_rewards: tuple[float, ...] = ()
    replayed: bool = False


@dataclass(frozen=True)
class TrainJob:
    """One train request. groups[g][i] is rollout i of scenario g. `evaluate`: compute the loss and change nothing."""

    request_id: str
    model: str
    groups: tuple[tuple[JobTrajectory, ...], ...]
    config: TrainConfig
    evaluate: bool = False


class _JobFile(Line):
    job: TrainJob


def write_job(folder: Path, job: TrainJob) -> None:
    """Write `job.json` and `tokens.safetensors` into a new folder. Raises OSError."""
    folder.mkdir(parents=True)
    samples = [sample for group in job.groups for trajectory in group for sample in trajectory.samples]
    tokens = {
        "prompt_ids": _joined([sample.prompt_ids for sample in samples], np.int32),
        "completion_ids": _joined([sample.completion_ids for sample in samples], np.int32),
        "logprobs": _joined([sample.logprobs for sample in samples], np.float32),
    }
    (folder / "tokens.safetensors").write_bytes(save(tokens))  # save_file hides a full disk in an error of its own
    scratch = folder / "job.json.part"
    scratch.write_text(_JobFile(job=job).model_dump_json(), encoding="utf-8")
    os.replace(scratch, folder / "job.json")


def read_job(folder: Path) -> TrainJob:
    """The job that `write_job` wrote. Raises OSError, ValueError."""
    arrays = {name: _Unread(values) for name, values in load_file(folder / "tokens.safetensors").items()}
    head = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    return _JobFile.model_validate(head, context=arrays).job


def _joined(arrays: Sequence[NDArray[Number]], dtype: type[Number]) -> NDArray[Number]:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
