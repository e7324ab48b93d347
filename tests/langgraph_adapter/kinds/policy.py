"""The policy of the catalogue, and what came of a block of code that was captured for it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from offbook import RemoteBackend, TrainableModel, Trajectory
from offbook.base.types import Call, CallOrigin, CallStatus
from offbook.testing import ScriptedServer
from offbook.testing.asgi import Body
from offbook_langgraph import capture


class Rollout:
    """A captured block, sync or async, and what came of it."""

    def __init__(self, server: ScriptedServer, model: TrainableModel, **options: Any) -> None:
        self.trajectory = Trajectory()
        self._server = server
        self._scope = capture(model, trajectory=self.trajectory, **options)
        self._before = len(server.sampler.received)

    @property
    def requests(self) -> list[Body]:
        """The payloads that the sampler received since the rollout was made."""
        return self._server.sampler.received[self._before :]

    def calls(self, count: int) -> list[Call]:
        """The calls recorded under the trajectory: exactly `count`, each with its ids and logprobs, and no others made."""
        found = self.recorded(count)
        for call in found:
            assert call.status == CallStatus.COMPLETE
            assert call.prompt_ids
            for output in call.outputs:
                assert output.token_ids
                assert len(output.logprobs) == len(output.token_ids)
                assert not any(map(math.isnan, output.logprobs))
        return found

    def recorded(self, count: int) -> list[Call]:
        """The calls recorded under the trajectory, of whatever status: exactly `count`, and no others made."""
        found = list(self._server.calls(self.trajectory.id))
        assert len(found) == len(self.requests) == count
        sampled = sorted(json.dumps([request["messages"], request.get("tools")]) for request in self.requests)
        assert sorted(json.dumps([call.messages, call.tools]) for call in found) == sampled
        return found

    def __enter__(self) -> Rollout:
        self._scope.__enter__()
        return self

    async def __aenter__(self) -> Rollout:
        await self._scope.__aenter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, trace)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._scope.__aexit__(kind, error, trace)


class Policy:
    """The trainable model, and rollouts on it."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self.model = TrainableModel(name="policy", base_model="tiny", backend=RemoteBackend(server.url))

    def rollout(self, **options: Any) -> Rollout:
        """A block whose selected calls go to the policy; options are those of `capture`."""
        return Rollout(self.server, self.model, **options)

    def refuse_next(self, status: int, message: str) -> None:
        """The engine refuses the next call."""
        self.server.sampler.refusals.append((status, message))


def origins(calls: Sequence[Call]) -> list[CallOrigin]:
    """Where the calls were made; every captured call knows."""
    found = [call.origin for call in calls if call.origin is not None]
    assert len(found) == len(calls)
    return found


def names_of(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of tools in OpenAI's form."""
    return [tool["function"]["name"] for tool in tools]


def one_branch(calls: Sequence[Call]) -> bool:
    """Whether each prompt extends the one before and what was sampled there, token by token."""
    known = [call.prompt_ids + call.outputs[0].token_ids for call in calls]
    return all(later.prompt_ids[: len(ids)] == ids for ids, later in zip(known, calls[1:], strict=False))


def until(met: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """The first true value of `met`; fails naming `what` after the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := met():
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")
