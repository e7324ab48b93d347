"""The e-mail example as its users run it: the agent alone, its reward, a training by the judge, and the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph_email_agent.agent import make_agent
from langgraph_email_agent.inbox import Inbox, make_mail
from langgraph_email_agent.judge import score
from langgraph_email_agent.questions import LONGEST_ANSWER, Question, make_questions, reward

import offbook
from offbook.testing import ShownConversation
from tests.examples.trainings import MEASURED, train_a_step
from tests.fakes.scripted_api import Asked, Reply, scripted_api

ASKED = Question("1", "How much does Greta Quist ask for the boiler at Heron?", "412.50", "m-7")


def conversation(*calls: tuple[str, dict[str, str], str], answer: str) -> dict[str, list[BaseMessage]]:
    """The state after calls (tool, arguments, result) and a last message."""
    messages: list[BaseMessage] = [HumanMessage(ASKED.question)]
    for number, (name, arguments, result) in enumerate(calls):
        messages.append(AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": str(number)}]))
        messages.append(ToolMessage(result, tool_call_id=str(number)))
    return {"messages": [*messages, AIMessage(answer)]}


SEARCH = ("search_inbox", {"words": "Heron boiler"}, '[{"message": "m-7", "subject": "Heron boiler quote"}]')
READ = ("read_message", {"message": "m-7"}, '{"from": "Greta Quist", "body": "It comes to 412.50 euros."}')
OTHER = ("read_message", {"message": "m-70"}, '{"from": "Greta Quist", "body": "It comes to 950.00 euros."}')


@pytest.mark.parametrize(
    ("calls", "answer", "earned"),
    [
        ([SEARCH, READ], "She asks for 412,50 euros.", (1.0, 1, 1, 1, 3)),
        ([SEARCH, READ], "She asks for 950 euros.", (0.3, 0, 1, 1, 3)),
        ([SEARCH, OTHER], "She asks for 950 euros.", (0.1, 0, 1, 0, 3)),
        ([SEARCH], "m-7", (0.1, 0, 1, 0, 2)),
        ([OTHER], "412.50", (0.7, 1, 0, 0, 2)),
        ([], "I do not know.", (0.0, 0, 0, 0, 1)),
        ([SEARCH, READ], f"412.50 {'or more ' * LONGEST_ANSWER}", (0.3, 0, 1, 1, 3)),
    ],
)
def test_each_part_of_the_work_is_rewarded(
    calls: list[tuple[str, dict[str, str], str]], answer: str, earned: tuple[float, ...]
) -> None:
    found = reward(ASKED, conversation(*calls, answer=answer))
    assert found == pytest.approx(dict(zip(("reward", "success", "found", "read", "turns"), earned, strict=True)))


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_the_agent_knows_nothing_of_offbook(example: Path) -> None:
    assert "offbook" not in (example / "agent.py").read_text().lower()
    code = "import sys, langgraph_email_agent.agent; sys.exit(sorted(name for name in sys.modules if name.startswith('offbook')) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=example.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_agent_runs_on_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that searches, reads the newest hit and answers with what it read."""
    mails = make_mail()
    question = next(each for each in make_questions(mails, 20) if each.answer[-1].isdigit())
    [source] = [mail for mail in mails if mail.id == question.message]

    def answer(asked: Asked) -> Reply:
        said = asked.body["messages"]
        if len(said) == 2:
            return completion("search_inbox", words=f"{source.cottage} {source.job} {source.kind}")
        if len(said) == 4:
            return completion("read_message", message=json.loads(said[-1]["content"])[0]["message"])
        return completion(None, text=json.loads(said[-1]["content"])["body"])

    with scripted_api(answer) as api:
        monkeypatch.setenv("OPENAI_API_BASE", api.url)
        monkeypatch.setenv("OPENAI_API_KEY", "key")
        state = make_agent(Inbox(mails)).invoke({"messages": [("user", question.question)]})
    assert reward(question, state) == {"reward": 1.0, "success": 1.0, "found": 1.0, "read": 1.0, "turns": 3.0}
    [first, *_] = api.asked
    assert [tool["function"]["name"] for tool in first.body["tools"]] == ["read_message", "search_inbox"]
    assert first.body["tools"][1]["function"]["parameters"]["required"] == ["words"]


def completion(tool: str | None, text: str = "", **arguments: str) -> Reply:
    """An answer of OpenAI's API: a text, or a tool call."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    calls = [{"id": "call-1", "type": "function", "function": function}] if tool else None
    message = {"role": "assistant", "content": text or None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if tool else "stop"}
    return Reply(json={"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})


def run(words: list[str | Path], folder: Path, **environment: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("calls", "answer", "earned"),
    [
        ([SEARCH, READ], "Greta Quist", 1.0),
        ([SEARCH, ("read_message", {"message": "m-7"}, '{"from": "Greta Quist", "body": "412.50"}')], "412,50", 1.0),
        ([SEARCH, ("read_message", {"message": "m-7"}, '{"from": "Greta Quist", "body": "412.50"}')], "413.50", 0.3),
        ([SEARCH, OTHER], "It comes to 950.00 euros.", 0.1),
        ([SEARCH], "m-7", 0.1),
        ([], "412.50", 0.0),
    ],
)
def test_the_scripted_judge_asks_whether_an_answer_was_read(
    calls: list[tuple[str, dict[str, str], str]], answer: str, earned: float
) -> None:
    messages: list[Any] = [{"role": "user", "content": ASKED.question}]
    for number, (name, arguments, result) in enumerate(calls):
        call = {"id": str(number), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": str(number), "content": result})
    messages.append({"role": "assistant", "content": answer})
    assert score([ShownConversation(messages)]) == pytest.approx(earned)


@pytest.mark.slow("whole trainings")
def test_a_step_is_trained_by_the_judge(tmp_path: Path, litellm: Any, local_backend: offbook.LocalBackend) -> None:
    words = ["--judge", "scripted", "--seed", "1", *MEASURED]  # a notebook trains seed 0
    trained = train_a_step(["langgraph_email_agent.train"], tmp_path, *words, backend=local_backend)
    assert trained == {"email-agent-ruler-1"}


@pytest.mark.slow("whole trainings")
async def test_the_command_line_trains_the_example_on_a_running_server(
    example: Path, tmp_path: Path, local_backend: offbook.LocalBackend
) -> None:
    written = run(["-m", "langgraph_email_agent.questions"], tmp_path, PYTHONPATH=str(example.parent))
    assert written == "train.jsonl: 600 questions\nheld_out.jsonl: 60 questions\n"
    for name in ("train.jsonl", "held_out.jsonl"):
        lines = (tmp_path / name).read_text().splitlines()
        assert set(json.loads(lines[0])) == {"id", "question", "answer", "message"}
        (tmp_path / name).write_text("\n".join(lines[:4]) + "\n")
    server = await local_backend.connect("tiny")
    command = (
        "train langgraph_email_agent.apps:tiny_email_agent --scenarios train.jsonl --eval held_out.jsonl --steps 1"
    )
    printed = run(
        ["-c", "from offbook.commands.main import main; main()", *command.split()],
        tmp_path,
        PYTHONPATH=str(example.parent),
        OFFBOOK_URL=server.url,
        OFFBOOK_API_KEY=server.key or "",
    )
    assert "step 1/1" in printed, printed
