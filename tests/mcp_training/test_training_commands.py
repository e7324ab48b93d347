"""`offbook mcp train | eval`: one line from a server to a LoRA."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offbook.commands.main import guarded
from offbook.testing import Action, ScriptedServer, scripted_server
from offbook.testing.asgi import Body
from offbook_mcp.commands import app
from offbook_mcp.scenarios.scenario import save_scenarios
from tests.mcp_training.order_server import scenarios, write_module

Called = Callable[..., tuple[int, str, str]]


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Called]:
    """`called("train", ...)` -> exit code, stdout, stderr, in this process and a folder with a server and scenarios."""
    write_module(tmp_path)
    save_scenarios(scenarios(), tmp_path / "s.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = guarded(lambda: app(words))
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    yield call
    sys.modules.pop("orders", None)


def knowing(body: Body) -> Action:
    """Knows what to call for half of the orders."""
    said = body["messages"][-1]
    text = said["content"] if isinstance(said["content"], str) else said["content"][0]["text"]
    if said["role"] == "tool":
        return Action(text)
    order = "".join(char for char in text if char.isdigit())
    return (
        Action(calls=(("order_status", json.dumps({"order": order})),))
        if "status" in text
        else Action("I do not know.")
    )


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(knowing, tmp_path_factory.mktemp("knowing")) as running:
        yield running


def test_a_dry_run_tells_the_plan_and_writes_nothing(called: Called, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    code, page, complaint = called("train", "orders:server", "--scenarios", "s.jsonl", "--dry-run", "--steps", "7")
    assert code == 0, complaint
    assert "scenarios  9 to train on, 3 held out" in page
    assert "steps      7, each 8 scenarios x 8 rollouts" in page
    assert "by tool: order_status 12" in page
    assert [each for each in sorted(tmp_path.iterdir()) if each not in before and each.name != "__pycache__"] == []


def test_without_scenarios_the_plan_tells_where_they_will_be_kept(called: Called) -> None:
    code, page, _ = called("train", "orders:server", "--dry-run", "--dir", "here")
    assert code == 0
    assert (
        "none yet: 48 are made from the tools' schemas and what they answer, about 36 to train on and 12 held out, and kept in "
        in page
    )
    assert "here/mcp/orders.jsonl" in page


def test_evaluation_prints_success_for_each_tool(called: Called, server: ScriptedServer, tmp_path: Path) -> None:
    words = ["--scenarios", "s.jsonl", "--url", server.url, "--model", "half"]
    words += ["--trace", "jsonl:shown"]
    code, page, complaint = called("eval", "orders:server", *words)
    assert code == 0, complaint
    assert "step 0, greedy, 3 scenarios: success 0%" in page  # the held-out ones leave the tool open
    assert page.splitlines()[-1].split() == ["order_status", "0%"]
    assert any(file.stat().st_size for file in (tmp_path / "shown").rglob("*.jsonl"))


def test_failed_rollouts_are_named_once(
    called: Called, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    def away_once(body: Body) -> Action:
        if "4111" in str(body["messages"]):
            raise ValueError("the model is away")
        return Action("I do not know.")

    folder = tmp_path_factory.mktemp("away")
    code, page, complaint = 1, "", ""
    with pytest.raises(ValueError, match="the model is away"), scripted_server(away_once, folder) as server:
        code, page, complaint = called("eval", "orders:server", "--scenarios", "s.jsonl", "--url", server.url)
    assert code == 0, complaint
    assert "1 rollout failed: 1 x " in page
    assert "of the evaluation failed" not in complaint + caplog.text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("train orders:server --scenarios nowhere.jsonl", 2, "offbook: scenarios: there is no file 'nowhere.jsonl'"),
        ("train orders:server --dir a --url http://127.0.0.1:9", 2, "--dir, --url: pass only one: a directory"),
        ("train orders:server --llm-api-base http://a", 2, "--llm-api-base needs --llm too"),
        ("eval orders:server --judge-api-base http://a", 2, "--judge-api-base needs --judge too"),
        ("train orders:server --trace wandb,nope", 2, "sinks: unknown sink 'nope'; available are jsonl:FOLDER"),
        ("train orders:nothing", 2, "target: orders has no 'nothing'"),
        ("train orders:server --learning-rate 7 --scenarios s.jsonl", 2, "learning_rate"),
    ],
)
def test_a_wrong_line_is_one_sentence(words: str, code: int, message: str, called: Called) -> None:
    given, _, complaint = called(*words.split())
    assert given == code
    assert message in complaint
    assert "Traceback" not in complaint
