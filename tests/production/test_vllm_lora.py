"""vLLM serves what was exported, and the user's own app, in a Python that cannot import Offbook, says on it what it says
on Offbook's server: greedily, the same messages and tool calls."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from offbook.tiny import path as tiny_policy
from tests.production import order_desk
from tests.production.conftest import Conversations, Trained

pytestmark = pytest.mark.slow("real vLLM")

WITHOUT_OFFBOOK = """
import runpy, sys
sys.modules.update({"offbook": None, "offbook_langgraph": None})
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
DEADLINE = 600.0
"""Seconds until vLLM has loaded the model; about 25 on an idle machine."""


@pytest.fixture(scope="module", autouse=True)
def installed(require: Callable[[bool, str], None]) -> None:
    """Skips where vLLM is not installed."""
    if sys.platform != "linux":
        pytest.skip("vLLM runs on Linux")
    require(find_spec("vllm") is not None, "scripts/bootstrap test")


@contextmanager
def vllm(folder: Path, model: Path, name: str, *options: str) -> Iterator[str]:
    """The URL of vLLM on `model`, started as docs/production.md says."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        name,
    ]
    command += ["--dtype", "float32", "--generation-config", "vllm", "--max-model-len", "2048", "--enforce-eager"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--port", str(port), *options]
    log = folder / "vllm.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment()) as process,
    ):
        try:
            wait_until_up(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.terminate()


def environment() -> dict[str, str]:
    """Nothing that leads to this Offbook, and no network."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        assert process.poll() is None, f"vLLM ended:\n{log.read_text()[-3000:]}"
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM was not up after {DEADLINE} s:\n{log.read_text()[-3000:]}")


def said(url: str, model: str, folder: Path) -> dict[str, Conversations]:
    """What the app says in a Python without Offbook, on `model` there: `whole`, and `streamed`."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OFFBOOK, order_desk.__file__, url, model],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def well_formed(conversations: Conversations, whole: Conversations) -> Conversations:
    """Those in which every tool call has an end. One that breaks off is text in vLLM's whole answers, and a call with what
    there was of it in its streams."""
    kept = [
        said
        for said, expected in zip(conversations, whole, strict=True)
        if not any("<tool_call>" in message["text"] for message in expected)
    ]
    assert len(kept) >= len(whole) // 2, "too little is left to compare"
    return kept


def test_an_app_without_offbook_says_the_same_on_vllm_with_the_exported_lora(desk: Trained, tmp_path: Path) -> None:
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"desk={desk.lora}")
    with vllm(tmp_path, tiny_policy(), "tiny", *lora) as url:
        trained, base = said(url, "desk", tmp_path), said(url, "tiny", tmp_path)
    assert (trained["whole"], base["whole"]) == (desk.trained, desk.base)
    assert well_formed(trained["streamed"], desk.trained) == well_formed(desk.trained, desk.trained)
