"""`app.trained(url=...)` against `offbook serve --inference-only` on a copy of the model's folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

import offbook
from offbook_langgraph import trainable
from tests.production.conftest import NOWHERE, Trained, drawn, said_by
from tests.production.order_desk import make_agent

DEADLINE = 120.0


@contextmanager
def inference_only(folder: Path) -> Iterator[str]:
    """The URL of `offbook serve --inference-only` on `folder`."""
    words = ["serve", "--inference-only", "--model", "tiny", "--port", "0", "--threads", "1", "--dir", str(folder)]
    with subprocess.Popen([sys.executable, "-m", "offbook", *words]) as process:
        try:
            facts, deadline = folder / "server.json", time.monotonic() + DEADLINE
            while not facts.exists():
                assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
            url = json.loads(facts.read_text())["url"]
            while httpx.get(f"{url}/health").json()["status"] != "ok":
                assert process.poll() is None and time.monotonic() < deadline, "the server did not load its model"
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


@pytest.mark.slow("more real servers")
def test_an_app_elsewhere_is_answered_by_an_inference_only_server(desk: Trained, tmp_path: Path) -> None:
    shutil.copytree(desk.folder, tmp_path / "default" / "models" / desk.model.name)
    model = offbook.TrainableModel(name=desk.model.name, base_model="tiny")
    app = trainable(make_agent(NOWHERE, "own"), model=model, reward=drawn)
    with inference_only(tmp_path) as url:
        assert said_by(app.trained(url=url, temperature=0.0)) == desk.trained
        assert said_by(app.trained(url=url, step=1, temperature=0.0)) == desk.trained
        assert said_by(app.trained(url=url, step=0, temperature=0.0)) == desk.base
        with pytest.raises(openai.NotFoundError, match="has no step 7; it has 0, 1"):
            app.trained(url=url, step=7).invoke({"messages": [("user", "say hello")]})
