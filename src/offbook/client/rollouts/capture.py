"""The context of a rollout: to which trajectory a model call belongs, and how evaluations make calls sample."""

from __future__ import annotations

import math
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, overload

from offbook.base.choices import choice_of
from offbook.base.errors import CaptureError, ConfigError, ServerError
from offbook.base.types import Call, CallTrace, History, Message, OutputTrace, Trajectory
from offbook.client.connection.http import Api

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import Choice


class Capture:
    """An active capture: a trajectory and the servers that recorded calls for it.

    `previous` is the context's capture before this one; `_outer` is the one around it, if it has the same trajectory.
    """

    def __init__(self, trajectory: Trajectory, outer: Capture | None, previous: Capture | None) -> None:
        self.trajectory = trajectory
        self.seen_by: list[Api] = []
        self.newest_call: str | None = None  # id of the recorded call answered last
        self.previous = previous
        self.ended = False
        self._outer = outer if outer is not None and outer.trajectory is trajectory else None
        self._at_end: list[Callable[[], object]] = []

    def sent_through(self, api: Api) -> None:
        """Note that a call of this trajectory was sent to this server."""
        if api not in self.seen_by:
            self.seen_by.append(api)

    def at_end(self, callback: Callable[[], object]) -> None:
        """Register a callback for the end of the outermost capture of the same trajectory."""
        if self._outer is not None:
            self._outer.at_end(callback)
        else:
            self._at_end.append(callback)

    def end(self) -> None:
        """Run the registered callbacks, the newest first."""
        while self._at_end:
            self._at_end.pop()()


_capture: ContextVar[Capture | None] = ContextVar("offbook_capture", default=None)
_of_process: list[Capture] = []
_left: ContextVar[bool] = ContextVar("offbook_left_captures", default=False)
_outside: ContextVar[bool] = ContextVar("offbook_outside", default=False)
_logging = threading.Lock()

LOGGED = "reward/"
"""Prefix of the metrics in which `log_reward` adds up its values."""


def active_capture() -> Capture | None:
    """The innermost capture of this context, else the newest process-wide one; None outside captures."""
    if _left.get():
        return None
    return _capture.get() or (_of_process[-1] if _of_process else None)


def current_trajectory() -> Trajectory | None:
    """The trajectory of the active capture; None outside a capture."""
    capture = active_capture()
    return capture.trajectory if capture else None


def leave_captures() -> None:
    """Take the current context out of all captures. Used by a gateway that answers an app's calls inside the same process."""
    _left.set(True)
    _capture.set(None)


def is_outside() -> bool:
    """Whether this context has left all captures, by `leave_captures` or for the block of `outside`."""
    return _left.get() or _outside.get()


def capture_of_calls() -> Capture | None:
    """The capture to which a model call made now belongs; None outside captures and inside `outside`."""
    return None if _outside.get() else active_capture()


@contextmanager
def outside() -> Generator[None]:
    """Take the model calls of a block out of the running rollout: those of a judge, or of a simulated user.

    They keep the app's own model and are not recorded with the rollout. This holds for tasks and threads that the block
    starts. `log_reward`, `log_metric` and `current_trajectory` still reach the rollout, and a capture that begins inside the
    block captures. Outside a rollout it does nothing.
    """
    with _placed(outside=True):
        yield


@contextmanager
def _placed(*, outside: bool) -> Generator[None]:
    previous = _outside.get()
    _outside.set(outside)
    try:
        yield
    finally:
        _outside.set(previous)


def inside() -> AbstractContextManager[None]:
    """Let a capture that begins inside the block of `outside` see its own calls."""
    return _placed(outside=False)


def enter_captures() -> None:
    """End the effect of `outside` in this context. Use it only in a copied context that is discarded afterwards."""
    _outside.set(False)


def check_answer(requested: str | None, answered: str | None, call_id: object) -> None:
    """Raise CaptureError for an answer that belongs to another trajectory than the request: a cache replayed it."""
    if requested is not None and answered is not None and requested != answered:
        raise replayed(
            f"a call of rollout {requested} got the answer of call {call_id!s:.80} of rollout {answered!s:.80}"
        )


def replayed(what: str) -> CaptureError:
    """The error for an answer that was given before."""
    return CaptureError(
        f"{what}: a cache between the app and the server answered, so the model was not asked and nothing was recorded. Turn "
        "the cache off in rollouts (vcr, LangSmith's with_cache or LANGSMITH_TEST_CACHE, hishel), or let it ignore the server's "
        "host"
    )


@contextmanager
def capturing(trajectory: Trajectory, *, process: bool = False) -> Generator[Trajectory]:
    """Assign model calls made inside the block to `trajectory`.

    The capture holds for this context and for tasks started from it. `process=True` extends it to threads and event loops
    that already run.
    """
    trajectory.captured = True
    capture = Capture(trajectory, active_capture(), _capture.get())
    if process:
        _of_process.append(capture)
    _capture.set(capture)
    try:
        with inside():
            yield trajectory
    finally:
        if process:
            _of_process.remove(capture)
        capture.ended = True
        current = _capture.get()  # blocks inside generators may end in any order, and in another context
        while current is not None and current.ended:
            current = current.previous
        _capture.set(current)
        capture.end()


def on_capture_end(callback: Callable[[], object]) -> None:
    """Register a callback that releases a rollout's resources when the rollout ends.

    The callback may run in another thread, and must not raise. Outside a capture it is never called.
    """
    capture = active_capture()
    if capture is not None:
        capture.at_end(callback)


def call_answered(trajectory_id: str, call_id: str) -> None:
    """Note that a recorded call was answered. `log_reward` credits this call until the next one is answered."""
    capture = capture_of_calls()
    if capture is not None and capture.trajectory.id == trajectory_id:
        capture.newest_call = call_id


def log_reward(value: float, key: str = "logged") -> None:
    """Add to the reward of the running rollout, on top of what the agent returns or `reward=` computes.

    The sum per key is the metric `reward/{key}`. The value is also credited to the call answered last, in the trajectory's
    `call_rewards`, which `TrainConfig(call_rewards=True)` uses. Outside a rollout this does nothing. Raises ConfigError for
    a value that is not a finite number.
    """
    number = _finite(value, f"log_reward({key!r})")
    capture = active_capture()
    if capture is None:
        return
    trajectory, name = capture.trajectory, f"{LOGGED}{key}"
    with _logging:  # tools run in threads
        trajectory.metrics[name] = float(trajectory.metrics.get(name, 0.0)) + number
        if capture.newest_call is not None:
            previous = trajectory.call_rewards.get(capture.newest_call, 0.0)
            trajectory.call_rewards[capture.newest_call] = previous + number


def log_metric(name: str, value: float) -> None:
    """Set a metric of the running rollout; outside a rollout this does nothing. Raises ConfigError for a value that is not
    a finite number, or a name that begins with `reward/`."""
    if name.startswith(LOGGED):
        raise ConfigError(f"log_metric: names that begin with {LOGGED!r} belong to log_reward, got {name!r}")
    trajectory = current_trajectory()
    number = _finite(value, f"log_metric({name!r})")
    if trajectory is not None:
        trajectory.metrics[name] = number


def logged_reward(trajectory: Trajectory) -> float | None:
    """The sum of all `log_reward` values; None when it was not called."""
    parts = [float(value) for name, value in trajectory.metrics.items() if name.startswith(LOGGED)]
    return math.fsum(parts) if parts else None


def _finite(value: object, source: str) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # user input, checked here
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{source}: a number is needed, got {value!r}") from error
    if not math.isfinite(number):
        raise ConfigError(f"{source}: a finite number is needed, got {value!r}")
    return number


@overload
def auto_trajectory(*, required: Literal[True]) -> Trajectory: ...
@overload
def auto_trajectory(*, required: bool = False) -> Trajectory | None: ...
def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """The trajectory of the enclosing capture. Outside a capture: None, or CaptureError if `required`."""
    trajectory = current_trajectory()
    if trajectory is None and required:
        raise CaptureError("no trajectory is being captured here: run this inside `capture_auto_trajectory(...)`")
    return trajectory


async def capture_auto_trajectory(rollout: Awaitable[object]) -> Trajectory:
    """Run a coroutine and return the trajectory of the calls that it made through `openai_client()`.

    Inside the coroutine, `auto_trajectory()` returns the trajectory, so that it can set the reward. Calls that continue
    the same conversation form one history. The first history is the trajectory's own; the others are its
    `additional_histories`.
    """
    trajectory = Trajectory()
    with capturing(trajectory):
        capture = active_capture()
        await rollout
    await show_calls(trajectory, capture.seen_by if capture else [])
    return trajectory.finish()


async def show_calls(trajectory: Trajectory, servers: Iterable[Api]) -> list[Call]:
    """Fill a captured trajectory with the conversations of the calls that these servers recorded under its id. Returns the
    calls."""
    calls: list[Call] = []
    for api in servers:
        calls += await recorded_calls(api, trajectory.id)
    histories = histories_of([call for call in calls if call.outputs])
    if histories:
        trajectory.messages_and_choices, trajectory.tools = histories[0].messages_and_choices, histories[0].tools
        trajectory.additional_histories = histories[1:]
    return calls


async def recorded_calls(api: Api, trajectory_id: str) -> tuple[Call, ...]:
    """The calls recorded under the id. Empty when the server does not know it: every call was rejected before recording."""
    try:
        return (await api.trajectory(trajectory_id)).calls
    except ServerError as error:
        if error.status == 404:
            return ()
        raise


def histories_of(calls: list[Call], *, marked: bool = True) -> list[History]:
    """Arrange calls in conversations. A call whose messages begin with those of an earlier conversation continues it.

    With `marked`, the choices name their recorded calls. Without, they look like choices of another endpoint.
    """
    histories: list[History] = []
    for call in sorted(calls, key=lambda call: call.started_at):
        sent = [_plain(message) for message in call.messages]
        tools = list(call.tools) if call.tools is not None else None
        index = next(
            (i for i, history in enumerate(histories) if history.tools == tools and _begins(sent, history)), None
        )
        if index is None:
            histories.append(History(messages_and_choices=list(call.messages), tools=tools))
            index = len(histories) - 1
        else:
            histories[index].messages_and_choices += call.messages[len(histories[index].messages_and_choices) :]
        histories[index].messages_and_choices.append(_choice(call, marked))
    return histories


def trace_of(
    call: Call, model: str, prompt_tokens: int, completion_tokens: int, cost: float | None = None
) -> CallTrace:
    """A call that `model`, another LLM, answered. Tokens of further choices count with the first: providers report sums."""
    outputs = tuple(
        OutputTrace(
            index=output.index,
            message={"role": "assistant", **output.message},
            finish_reason=output.finish_reason,
            status=output.status,
            tokens=completion_tokens if number == 0 else 0,
            logprob_mean=None,
            logprob_min=None,
        )
        for number, output in enumerate(call.outputs)
    )
    return CallTrace(
        id=call.id,
        trajectory_id=call.trajectory_id,
        model=model,
        step=0,
        status=call.status,
        sampling=call.sampling,
        messages=call.messages,
        tools=call.tools,
        prompt_tokens=prompt_tokens,
        outputs=outputs,
        started_at=call.started_at,
        ended_at=call.ended_at,
        cost=cost,
    )


def continues(whole: History, part: History) -> bool:
    """Whether the conversation `whole` begins with the messages of `part`."""
    return _begins([_plain(dict(message)) for message in whole.messages()], part)


def _begins(sent: list[Message], history: History) -> bool:
    known = [_plain(dict(message)) for message in history.messages()]
    return sent[: len(known)] == known


def _plain(message: Message) -> Message:
    """The message without fields that clients drop or add: empty fields, and the name of an assistant message."""
    named = message.get("role") == "assistant"
    return {
        key: value for key, value in message.items() if value not in (None, "", []) and not (named and key == "name")
    }


def _choice(call: Call, marked: bool) -> Choice:
    output = call.outputs[0]
    mark = {"call_id": call.id, "trajectory_id": call.trajectory_id, "index": output.index, "step": call.step}
    choice: dict[str, object] = {
        "index": output.index,
        "finish_reason": output.finish_reason or "stop",
        "message": {"role": "assistant", **output.message},
    }
    return choice_of(choice | {"offbook": mark} if marked else choice)


MAX_COMPLETION_TOKENS = 1024
"""Default limit of a rollout's completions, in tokens."""

_temperature: ContextVar[float | None] = ContextVar("offbook_temperature", default=None)
_completion_limit: ContextVar[int | None] = ContextVar("offbook_completion_limit", default=None)


def forced_temperature() -> float | None:
    """The temperature for calls to trainable models in this context; None: the agent's own."""
    return _temperature.get()


def completion_limit() -> int | None:
    """The most tokens of a trainable model's completion in this context; None: the agent's own limit."""
    return _completion_limit.get()


@contextmanager
def at_temperature(temperature: float | None) -> Generator[None]:
    """Sample trainable models at this temperature inside the block, in this context. None leaves it to the agent."""
    token = _temperature.set(temperature)
    try:
        yield
    finally:
        _temperature.reset(token)


@contextmanager
def completions_limited(limit: int) -> Generator[None]:
    """Limit completions of trainable models inside the block, in this context, to `limit` tokens."""
    token = _completion_limit.set(limit)
    try:
        yield
    finally:
        _completion_limit.reset(token)
