"""`capture`: a block of code whose chat model calls belong to one trajectory."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from understudy.client.capture import capturing
from understudy.client.model import TrainableModel
from understudy.types import Trajectory

from .capture import Capture, Select, activated
from .chat_model import ChatUnderstudy
from .endpoint import chat_model, chat_model_now
from .patches import install


class capture:  # used like a function: `async with capture(model) as trajectory`
    """Inside, the app's selected chat model calls go to `model` and are recorded under one trajectory, which the block
    is given. Works with `with` and `async with`, around one rollout at a time."""

    def __init__(
        self,
        model: TrainableModel,
        *,
        trajectory: Trajectory | None = None,
        select: Select | None = None,
        temperature: float | None = 1.0,
    ) -> None:
        self._model = model
        self._trajectory = trajectory or Trajectory()
        self._select = select
        self._temperature = temperature
        self._stack = ExitStack()

    async def __aenter__(self) -> Trajectory:
        return self._enter(await chat_model(self._model, self._temperature))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __enter__(self) -> Trajectory:
        return self._enter(chat_model_now(self._model, self._temperature))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _enter(self, target: ChatUnderstudy) -> Trajectory:
        install()
        trajectory = self._stack.enter_context(capturing(self._trajectory))
        self._stack.enter_context(activated(Capture(target, trajectory.id, self._select)))
        return trajectory
