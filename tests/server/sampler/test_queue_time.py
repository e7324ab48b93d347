"""The queue time that vLLM's metrics say: a number that cannot be is unknown, and ends no train step."""

from __future__ import annotations

import httpx
import pytest

from offbook.testing.server import ConnectedSampler

LINE = 'vllm:request_queue_time_seconds_{}{{engine="0"}} {}\n'


@pytest.mark.parametrize(
    ("seconds", "calls", "mean"),
    [("6.0", "3.0", 2.0), ("NaN", "3.0", None), ("-6.0", "3.0", None), ("+Inf", "3.0", None), ("six", "3.0", None)],
)
async def test_the_mean_of_the_queue_times_is_a_time_or_unknown(seconds: str, calls: str, mean: float | None) -> None:
    page = LINE.format("sum", seconds) + LINE.format("count", calls)
    sampler = ConnectedSampler("http://127.0.0.1:9")
    assert sampler.connection is not None
    await sampler.connection.control.aclose()
    answers = httpx.MockTransport(lambda _: httpx.Response(200, text=page))
    sampler.connection.control = httpx.AsyncClient(transport=answers, base_url="http://sampler")
    try:
        assert await sampler.calls.queue_seconds() == mean
    finally:
        await sampler.stop()
