"""Models that answer in place of the trained one: another LLM behind an endpoint, and a fixed step."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from offbook.base.types import Json
from offbook.base.wire import name_at

from .backend import Registration
from .connection.http import Api
from .inference import openai_client
from .model import Model, TrainableModel
from .rollouts.capture import capture_of_calls


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
