"""The connection to a Ray cluster that cannot be had."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from offbook.base.errors import BackendError
from offbook_ray import ray_runner


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Could not find any running Ray instance"),
        Exception("The current node timed out during startup"),  # as ray's node.py raises it
    ],
)
def test_why_ray_does_not_connect_is_told_with_what_to_start(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(ray_runner, "ray_module", lambda: SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(
        BackendError, match=rf"RayRunner: no Ray cluster at address='auto' \({error}\): start one with `ray"
    ):
        ray_runner.connect("auto")


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nothing_listens_is_told_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(*args: object, **options: object) -> None:
        pytest.fail("Ray would wait for minutes")

    monkeypatch.setattr(ray_runner, "ray_module", lambda: SimpleNamespace(is_initialized=lambda: False, init=init))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = form.format(free.getsockname()[1])
        with pytest.raises(BackendError, match=rf"RayRunner: no Ray cluster at address='{address}' \(.*refused\)"):
            ray_runner.connect(address)
