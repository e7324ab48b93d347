"""The order desk: its database, tools, requests and reward, checked by hand."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage

from offbook.quickstart.desk import HELD_OUT_FRAMES, REQUESTS, TOOLS, Desk, Request, reward


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk") / "desk.db")


DIAL = Request("1", "what do I dial about order 4821?", "4821", "customer_phone", "555-0142")


def conversation(*calls: tuple[str, dict[str, str]], answer: str) -> list[BaseMessage]:
    messages: list[BaseMessage] = [HumanMessage(DIAL.question)]
    for number, (name, arguments) in enumerate(calls):
        messages.append(AIMessage("", tool_calls=[{"name": name, "args": arguments, "id": str(number)}]))
        messages.append(ToolMessage("{}", tool_call_id=str(number)))
    return [*messages, AIMessage(answer)]


def test_the_right_answer_earns_one() -> None:
    first = ("order_customer", {"order": "4821"})
    said = conversation(first, ("customer_phone", {"customer": "C-31"}), answer="The answer is 555-0142.")
    assert reward(DIAL, said) == {"reward": 1.0, "success": 1.0}


def test_a_right_first_call_earns_a_fifth() -> None:
    said = conversation(("order_customer", {"order": "4821"}), answer="The answer is C-31.")
    assert reward(DIAL, said) == {"reward": 0.2, "success": 0.0}


@pytest.mark.parametrize(
    "first",
    [
        ("order_status", {"order": "4821"}),
        ("order_customer", {"order": "4812"}),
        ("customer_phone", {"customer": "4821"}),
    ],
)
def test_a_wrong_first_call_earns_nothing(first: tuple[str, dict[str, str]]) -> None:
    assert reward(DIAL, conversation(first, answer="The answer is lost.")) == {"reward": 0.0, "success": 0.0}


def test_an_answer_counts_only_as_a_whole_word() -> None:
    customer = Request("2", "", "4821", "order_customer", "C-3")
    assert reward(customer, conversation(answer="The answer is C-31."))["success"] == 0.0
    assert reward(customer, conversation(answer="The answer is C-3."))["success"] == 1.0


def test_every_request_can_be_answered_with_the_tools(desk: Desk) -> None:
    tools = {tool.name: tool for tool in desk.tools()}
    assert tuple(tools) == TOOLS
    for request in desk.requests("train", 30):
        key = {"order": request.order}
        if request.tool.startswith("customer_"):
            key = tools["order_customer"].invoke(key)
        column = request.tool.split("_")[1]
        assert tools[request.tool].invoke(key) == {column: request.answer}


def test_held_out_requests_are_the_same_for_all_seeds_and_share_nothing_with_training(desk: Desk) -> None:
    held_out = desk.requests("test", 120, seed=1)
    assert held_out == desk.requests("test", 120, seed=2)
    trained = desk.requests("train", 400, seed=1)
    assert trained != desk.requests("train", 400, seed=2)
    assert not {request.order for request in held_out} & {request.order for request in trained}
    assert not {request.question for request in held_out} & {request.question for request in trained}
    assert {tool: sum(request.tool == tool for request in held_out) for tool in REQUESTS} == dict.fromkeys(REQUESTS, 30)
    assert len(HELD_OUT_FRAMES) == 3


def test_requests_do_not_name_the_tool(desk: Desk) -> None:
    for request in desk.requests("train", 200):
        column = request.tool.split("_")[1]
        assert column not in request.question, request.question


def test_an_unknown_order_has_no_row(desk: Desk) -> None:
    assert desk.look_up("order_status", "1") is None
