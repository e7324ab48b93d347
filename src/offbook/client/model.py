"""Models by name: `Model` is any model that agents can call, `TrainableModel` is one that is trained here. In its place may
answer another LLM behind an endpoint, or one of its steps."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Generic, cast, get_args

from openai import AsyncOpenAI
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import TypeVar

from offbook.base.config import LoraOptions, SFTConfig, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.option_names import check_options, names_checked
from offbook.base.types import (
    Json,
    Metric,
    RolloutPlace,
    TrainResult,
    Trajectory,
    TrajectoryGroup,
    new_id,
)
from offbook.base.user_values import as_list
from offbook.base.wire import (
    KEPT_WELL,
    OPEN,
    RECORD_HEADER,
    TRAJECTORY_HEADER,
    CheckpointState,
    ExportFormat,
    ExportRequest,
    ForkRequest,
    LogRequest,
    RegisterRequest,
    TrainEvent,
    name_at,
)
from offbook.supervised.masking import TextFilter

from .backend import Backend, Registration, RemoteBackend, one_config
from .connection.http import Api, LoopTransport, checked_name
from .connection.progress import Bar
from .inference import httpx_client, openai_client
from .local import LocalBackend
from .rollouts.capture import capture_of_calls, forced_temperature
from .rollouts.records import as_json, rollout_records
from .supervised_training import SFTResult, SupervisedTraining, TrainingData, read_examples, request_prefix

logger = logging.getLogger("offbook")

BEST_METRIC = "val/reward"
TRAIN_SPLIT = "train/"

Rollouts = Iterable[Trajectory | TrajectoryGroup]

ConfigT = TypeVar("ConfigT", default=Any)


class Model(Generic[ConfigT]):
    """A model that agents can call, such as another LLM to compare with.

    `config` is the user's own object, and `Model[Config]` is the type for annotations. As a field of a pydantic model,
    it is serialised to JSON by its name. The `inference_*` arguments describe an OpenAI-compatible endpoint. If one is
    None, the OpenAI SDK's default applies.
    """

    def __init__(
        self,
        name: str,
        project: str = "default",
        config: ConfigT | None = None,
        *,
        inference_api_key: str | None = None,
        inference_base_url: str | None = None,
        inference_model_name: str | None = None,
        **foreign: object,
    ) -> None:
        check_options("Model", foreign, [*inspect.signature(Model).parameters][:-1])
        self.name = name
        self.project = project
        self.config = cast(ConfigT, config)
        self.inference_model_name = inference_model_name
        self._inference_api_key = inference_api_key
        self._inference_base_url = inference_base_url
        self._backend: Backend | None = None

    trainable = False

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler

        def name(model: Model[Any]) -> str:
            return model.name

        written = core_schema.plain_serializer_function_ser_schema(name, when_used="json")
        return core_schema.is_instance_schema(cls, serialization=written)

    @property
    def inference_base_url(self) -> str | None:
        """Base URL of its OpenAI-compatible endpoint. None: the default of the OpenAI SDK."""
        return self._inference_base_url

    @property
    def inference_api_key(self) -> str | None:
        """API key of that endpoint. None: the OpenAI SDK reads its environment variable."""
        return self._inference_api_key

    async def register(self, backend: Backend) -> None:
        """Choose the server that stores this model's logs and state."""
        self._backend = backend

    def inference_name(self, step: int | None = None) -> str:
        """The `model` field of requests. Raises ConfigError for a `step`: only trainable models have steps."""
        if step is not None:
            raise ConfigError(f"step={step!r}: {self.name!r} is not trained here and has no steps")
        return self.inference_model_name or self.name

    def get_inference_name(self, step: int | None = None) -> str:
        """Alias of `inference_name`; OpenPipe ART uses this name."""
        return self.inference_name(step)

    def openai_client(self) -> AsyncOpenAI:
        """A plain AsyncOpenAI for this model, usable from any event loop."""
        secure = not (self.inference_base_url or "").startswith("http://")
        http = LoopTransport(secure=secure)
        return AsyncOpenAI(
            base_url=self.inference_base_url, api_key=self.inference_api_key, http_client=httpx_client(http)
        )

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Json]:
        """Arguments for `litellm.acompletion` that call this model."""
        params: dict[str, Json] = {"model": self.inference_name(step)}
        if self.inference_base_url is not None:
            params |= {"model": f"openai/{self.inference_name(step)}", "base_url": self.inference_base_url}
        return params | ({"api_key": self.inference_api_key} if self.inference_api_key else {})

    async def log(
        self,
        trajectories: Rollouts | None = None,
        *,
        split: str = "val",
        metrics: Mapping[str, Metric] | None = None,
        step: int | None = None,
    ) -> None:
        """Store rollouts and metrics with the model.

        The mean reward and the mean of each rollout metric are added as `{split}/reward` and `{split}/{name}`.
        `step=None` means the newest step of a trainable model. Raises ConfigError, ServerError.
        """
        one_group = isinstance(trajectories, TrajectoryGroup)
        items = [trajectories] if one_group else as_list(trajectories or (), "trajectories", "rollout")
        records = rollout_records(items, self.name, RolloutPlace(split=split, step=step))
        values = _means(*_flat(items)) | {name: float(value) for name, value in (metrics or {}).items()}
        api = await self.api()
        if records:
            await api.finish(records)
        request = LogRequest(
            split=split,
            step=step if step is not None else await self._log_step(),
            metrics={name if "/" in name else f"{split}/{name}": value for name, value in values.items()},
            trajectory_ids=tuple(record.id for record in records),
        )
        await api.log(self.name, request)

    async def get_step(self) -> int:
        """0: a model that is not trained here has no steps."""
        return 0

    async def overwrite_state(self, state: Mapping[str, object]) -> None:
        """Replace the user's JSON object that the server stores with the model. Raises ConfigError for a value that is
        not JSON."""
        await (await self.api()).set_state(self.name, as_json(state, "state"))

    async def merge_state(self, state: Mapping[str, object]) -> dict[str, Json]:
        """Replace single keys of the stored JSON object and return all of it. Not atomic: it reads, then writes."""
        merged = await self.read_state() | dict(state)
        await self.overwrite_state(merged)
        return merged

    async def read_state(self) -> dict[str, Json]:
        """The JSON object stored with the model. It is empty if none was stored."""
        return await (await self.api()).state(self.name)

    async def api(self) -> Api:
        """The server that stores the logs. Raises ConfigError before `register()`."""
        if self._backend is None:
            raise ConfigError(
                f"model {self.name!r} has no server to keep its logs: `await model.register(backend)` first"
            )
        return await self._backend.connect()

    async def _log_step(self) -> int | None:
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, project={self.project!r})"


class TrainableModel(Model[ConfigT]):
    """A base model and the newest LoRA trained under this name.

    `base_model` is a Hugging Face name, a folder, "tiny", or the folder of a PEFT LoRA. Such a LoRA becomes step 1 of
    the model, on the base that it names. The constructor sends nothing. The first use registers the model on `backend`;
    without one, on the server at OFFBOOK_URL; else on a LocalBackend. `lora=None` keeps the LoRA shape of an existing
    model, and uses the defaults for a new one.
    """

    trainable = True

    def __init__(
        self,
        name: str,
        project: str = "default",
        base_model: str = "",
        backend: Backend | None = None,
        lora: LoraOptions | Mapping[str, object] | None = None,
        config: ConfigT | None = None,
        **foreign: object,
    ) -> None:
        check_options("TrainableModel", foreign, ["name", "project", "base_model", "backend", "lora", "config"])
        if not base_model:
            raise ConfigError(
                'base_model: name a base, such as "Qwen/Qwen2.5-7B-Instruct", or "tiny" for the bundled one'
            )
        _check_kinds(backend, lora)
        super().__init__(
            checked_name(name, "name"), checked_name(project, "project"), config, inference_model_name=name
        )
        self.base_model = base_model
        self.lora = LoraOptions.parse(**lora) if isinstance(lora, Mapping) else lora
        self._registration = None if backend is None else self._registration_on(backend)
        self._recording = new_id(OPEN)

    @property
    def backend(self) -> Backend:
        """The backend that samples from the model and trains it. If the constructor got none, it is chosen at first use."""
        return self._on_backend().backend

    @property
    def inference_base_url(self) -> str:
        """Base URL for your own OpenAI client. The server records its calls. A call belongs to the trajectory that
        holds its choice.

        Raises ConfigError before the model is registered; `openai_client()` works at any time.
        """
        return f"{self._known_api().url}/t/{self._recording}/v1"

    @property
    def inference_api_key(self) -> str:
        """The server's key, or "none" (the SDK needs a value). Raises ConfigError before the model is registered."""
        return self._known_api().key or "none"

    @names_checked("register")
    async def register(self, backend: Backend | None = None) -> None:
        """Register the model on the backend's server. Idempotent.

        Raises ServerError if the name exists with another base model or LoRA shape, and BackendError if the server
        cannot be started.
        """
        if backend is not None and (self._registration is None or backend is not self._registration.backend):
            self._registration = self._registration_on(backend)
        await self.api()

    async def api(self) -> Api:
        """The running server with this model registered. Concurrent callers share one connection attempt."""
        return await self._on_backend().api()

    def openai_client(self) -> AsyncOpenAI:
        """An AsyncOpenAI without retries, usable from any event loop, whose calls the server records.

        Inside a capture, the calls belong to the capture's trajectory. Outside a capture, a call belongs to the
        trajectory that holds its choice.
        """
        server = self._server()
        return openai_client(self.api, server.url if server is not None else None)

    def inference_name(self, step: int | None = None) -> str:
        """The `model` field of requests: the newest step, or the fixed `step`."""
        return self.name if step is None else name_at(self.name, step)

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Json]:
        """Arguments for `litellm.acompletion`. Calls are recorded and not retried; an evaluation's temperature is included.

        Raises ConfigError before the model is registered.
        """
        api, capture, temperature = self._known_api(), capture_of_calls(), forced_temperature()
        label = {RECORD_HEADER: "1"}
        if capture is not None:
            capture.sent_through(api)
            label = {TRAJECTORY_HEADER: capture.trajectory.id}
        params: dict[str, Json] = {
            "model": f"hosted_vllm/{self.inference_name(step)}",
            "base_url": f"{api.url}/v1",
            "api_key": self.inference_api_key,
            "extra_headers": label,
            "num_retries": 0,
        }
        return params if temperature is None else params | {"temperature": temperature}

    async def get_step(self) -> int:
        """The newest step: the number of train requests applied."""
        return (await (await self.api()).model(self.name)).step

    async def train(
        self,
        groups: Iterable[TrajectoryGroup] | None = None,
        config: TrainConfig | Mapping[str, object] | None = None,
        *,
        request_id: str | None = None,
        on_event: Callable[[TrainEvent], None] | None = None,
        pbar_desc: str | None = "train",
        timeout: float | None = None,
        **options: object,
    ) -> TrainResult:
        """Train one step on these groups; see `Backend.train` for options and errors."""
        return await self.backend.train(
            self,
            groups,
            config,
            request_id=request_id,
            on_event=on_event,
            pbar_desc=pbar_desc,
            timeout=timeout,
            **options,
        )

    async def train_sft(
        self,
        what: TrainingData,
        config: SFTConfig | Mapping[str, object] | None = None,
        *,
        filter: TextFilter | None = None,
        request_id: str | None = None,
        on_event: Callable[[TrainEvent], None] | None = None,
        pbar_desc: str | None = "sft",
        timeout: float | None = None,
        **options: object,
    ) -> SFTResult:
        """Imitate the assistant's turns in rollouts or in recorded conversations. Each batch is one step.

        `what`: trajectories or groups, whose rewards are ignored; or conversations, as a `.jsonl` file, a list or a
        data set (see `read_conversations`). `filter` is applied to all texts except those of recorded calls. Pass
        `config`, or SFTConfig's fields as `options`. After an interruption, the same call on the same server continues,
        also within an epoch, and applies nothing twice. `request_id` is the prefix of the request ids; its default is a
        digest of examples and options. `timeout`: seconds for each batch.
        Raises ConfigError, TrainError, ServerError, TimeoutError."""
        options.pop("verbose", None)  # of OpenPipe ART
        settings = one_config(SFTConfig, config, options)
        examples = read_examples(what, self.name, skip_bad=settings.skip_bad, filter=filter)
        prefix = request_id or request_prefix(examples.examples, settings, self.name)
        training = SupervisedTraining(await self.api(), self.name, settings, prefix, on_event, timeout)
        with Bar(pbar_desc) as bar:
            return await training.run(examples, bar)

    async def checkpoints(self) -> list[CheckpointState]:
        """The existing checkpoints, by step. Step 0 is the base and has no checkpoint."""
        return await (await self.api()).checkpoints(self.name)

    async def delete_checkpoints(self, best_checkpoint_metric: str | None = None) -> list[int]:
        """Delete all checkpoints except the newest and the best by a logged metric. Returns the deleted steps.

        The default metric is `val/reward`, which a Trainer's evaluations log. `train/...` names a metric of the rollouts
        trained on. If no step has the named metric, raises ConfigError and deletes nothing. For `train/...` this is
        only a warning, because a model's first step cannot have it.
        """
        api = await self.api()
        checkpoints = await api.checkpoints(self.name)
        if not checkpoints:
            return []
        best = best_step(checkpoints, await api.logs(self.name), best_checkpoint_metric)
        kept = {checkpoints[-1].step, best.step if best is not None else None}
        deleted = [state.step for state in checkpoints if state.step not in kept]
        if best is not None and best.split == "train" and best.step is not None and best.step + 1 in deleted:
            await api.log(self.name, best)  # the value is stored with the next checkpoint, which is deleted below
        for step in deleted:
            await api.delete_checkpoint(self.name, step)
        return deleted

    async def keep_checkpoints(self, newest: int, named: Collection[int] = ()) -> list[int]:
        """Delete all checkpoints except the `newest` ones, the best by `val/reward`, the steps `named`, and those
        that the server still reads. Returns the deleted steps. Raises ServerError."""
        api = await self.api()
        checkpoints = await api.checkpoints(self.name)
        held = (await api.model(self.name)).steps_held
        old = checkpoints[: -max(newest, held + 1)]
        if not old:
            return []
        logs = [entry for entry in await api.logs(self.name) if BEST_METRIC in entry.metrics]
        best = best_step(checkpoints, logs, None) if logs else None
        deleted = [state.step for state in old if state.step not in (best and best.step, *named)]
        for step in deleted:
            await api.delete_checkpoint(self.name, step)
        return deleted

    async def fork(self, name: str, *, from_step: int | None = None, project: str | None = None) -> TrainableModel[Any]:
        """Create a model that starts from a step of this one. `from_step=None`: the newest; `project=None`: the same."""
        request = ForkRequest(name=name, project=project, from_step=from_step)
        state = await (await self.api()).fork(self.name, request)
        return TrainableModel(state.name, state.project, self.base_model, self.backend, state.lora)

    async def export(self, output: str | os.PathLike[str], *, step: int | None = None, format: str = "peft") -> str:
        """Write a step to a new folder on the server's machine and return its path. `step=None`: the newest.

        Formats: `peft` is the LoRA; `merged` is base and LoRA as one model; `gguf-ready` is the merged model in 16 bits, as
        llama.cpp's converter reads it. A warning is logged where rounding took much of the adapter. Raises ConfigError for
        another format, ServerError.
        """
        if format not in get_args(ExportFormat):
            raise ConfigError(f"format: {format!r} must be one of {', '.join(get_args(ExportFormat))}")
        api = await self.api()
        exported_step = step if step is not None else await self.get_step()
        request = ExportRequest(format=cast(ExportFormat, format), output=self.backend.path_on_server(output))
        result = await api.export(self.name, exported_step, request)
        if result.adapter_kept is not None and result.adapter_kept < KEPT_WELL:
            logger.warning("%s: %s", result.path, result.note)
        return result.path

    async def _log_step(self) -> int | None:
        return await self.get_step()

    def _on_backend(self) -> Registration:
        if self._registration is None:
            url = os.environ.get("OFFBOOK_URL")
            self._registration = self._registration_on(RemoteBackend(url) if url else LocalBackend())
        return self._registration

    def _registration_on(self, backend: Backend) -> Registration:
        request = RegisterRequest(name=self.name, project=self.project, base_model=self.base_model, lora=self.lora)
        return Registration(backend, request)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a registered model: in another process it uses the same server. Raises ConfigError for another one."""
        api = self._known_api()
        backend = RemoteBackend(api.url, api.key)
        return type(self), (self.name, self.project, self.base_model, backend, self.lora, self.config)

    def _server(self) -> Api | None:
        """The server on which it is registered; None before its first use."""
        return self._registration.server if self._registration is not None else None

    def _known_api(self) -> Api:
        server = self._server()
        if server is None:
            raise ConfigError(
                f"model {self.name!r} is not registered yet: `await model.register()` before asking for its URL"
            )
        return server


class EndpointModel(Model[Any]):
    """A model behind an endpoint that labels its responses as an Offbook server does.

    Calls made inside a capture belong to its trajectory.
    """

    def __init__(self, name: str, endpoint: Api) -> None:
        super().__init__(name, inference_model_name=name)
        self.endpoint = endpoint

    @property
    def inference_base_url(self) -> str:
        """The endpoint's base URL, which names the trajectory of the active capture, if any."""
        capture = capture_of_calls()
        prefix = "" if capture is None else f"/t/{capture.trajectory.id}"
        return f"{self.endpoint.url}{prefix}/v1"

    @property
    def inference_api_key(self) -> str:
        """The endpoint's key, or "none": the SDK needs a value."""
        return self.endpoint.key or "none"

    def openai_client(self) -> AsyncOpenAI:
        """An AsyncOpenAI without retries, usable from any event loop. Its calls belong to the active capture."""

        async def find() -> Api:
            return self.endpoint

        return openai_client(find, self.endpoint.url)

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Json]:
        """Arguments for `litellm.acompletion` that call this model without retries."""
        return super().litellm_completion_params(step) | {"num_retries": 0}


class FixedStepModel(TrainableModel[Any]):
    """A trained model pinned to one of its steps."""

    def __init__(self, model: TrainableModel[Any], step: int) -> None:
        super().__init__(model.name, model.project, model.base_model, lora=model.lora)
        self.step = step
        self._model = model

    async def get_step(self) -> int:
        """The pinned step."""
        return self.step

    def inference_name(self, step: int | None = None) -> str:
        """The `model` field of requests: the pinned step, or `step`."""
        return name_at(self.name, self.step if step is None else step)

    def _on_backend(self) -> Registration:
        return self._model._on_backend()  # pyright: ignore[reportPrivateUsage]  # one connection for all steps of a model

    def _server(self) -> Api | None:
        return self._model._server()  # pyright: ignore[reportPrivateUsage]


def _check_kinds(backend: object, lora: object) -> None:
    if backend is not None and not isinstance(backend, Backend):
        write = f"RemoteBackend({backend!r})" if isinstance(backend, str) else "RemoteBackend(url), or LocalBackend()"
        raise ConfigError(f"backend: a backend is needed, got {backend!r:.200}: write backend={write}")
    if lora is not None and not isinstance(lora, LoraOptions | Mapping):
        raise ConfigError(f"lora: LoraOptions are needed, got {lora!r:.200}: write lora=LoraOptions(r=...)")


def _flat(rollouts: Rollouts) -> tuple[list[Trajectory], int]:
    """All trajectories, and the number of rollouts of which only an exception is left."""
    trajectories: list[Trajectory] = []
    failed = 0
    for item in rollouts:
        trajectories += item.trajectories if isinstance(item, TrajectoryGroup) else [item]
        failed += len(item.exceptions) if isinstance(item, TrajectoryGroup) else 0
    return trajectories, failed


def _means(rollouts: list[Trajectory], failed: int) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            values.setdefault("reward", []).append(float(rollout.reward))
        for name, value in rollout.metrics.items():
            values.setdefault(name, []).append(float(value))
    if rollouts or failed:
        values["exception_rate"] = [float(rollout.exception is not None) for rollout in rollouts] + [1.0] * failed
    return {name: fmean(numbers) for name, numbers in values.items()}


def best_step(
    checkpoints: Sequence[CheckpointState], logs: Sequence[LogRequest], named: str | None
) -> LogRequest | None:
    """Return the step with the highest value of the metric, and that value; the later step wins a tie.

    `named=None` means `val/reward`. When no checkpoint has the metric, a named one raises ConfigError. The default metric
    and `train/...`, which a model's first step cannot have, are logged as a warning and return None.
    """
    metric = BEST_METRIC if named is None else named
    existing = {state.step for state in checkpoints}
    values = {entry.step: entry.metrics[metric] for entry in logs if entry.step is not None and metric in entry.metrics}
    values |= _train_values(checkpoints, metric) if metric.startswith(TRAIN_SPLIT) else {}
    scored = {step: value for step, value in values.items() if step in existing}
    if scored:
        step = max(scored, key=lambda step: (scored[step], step))
        split = "train" if metric.startswith(TRAIN_SPLIT) else "val"
        return LogRequest(split=split, step=step, metrics={metric: scored[step]})
    if named is not None and not metric.startswith(TRAIN_SPLIT):
        known = sorted({name for entry in logs if entry.step in existing for name in entry.metrics})
        raise ConfigError(
            f"best_checkpoint_metric: no checkpoint has {named!r}; the logged metrics are "
            f"{', '.join(known) or 'none'}: choose one of these"
        )
    logger.warning("no checkpoint has the metric %r: only the newest step is kept", metric)
    return None


def _train_values(checkpoints: Sequence[CheckpointState], metric: str) -> dict[int, float]:
    """Values of a training metric by step.

    A checkpoint stores the metrics of the training step that created it. Their rollouts were sampled by the step before,
    so a value belongs to that earlier step.
    """
    name = metric.removeprefix(TRAIN_SPLIT)
    values = {state.step - 1: state.metrics.get(name, state.metrics.get(f"{name}/mean")) for state in checkpoints}
    return {step: value for step, value in values.items() if value is not None}
