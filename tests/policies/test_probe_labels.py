import random

from policies.episodes import Episode, exchange
from policies.probe_labels import ARGUMENT, FIRST_TOOL, NAME, NOTHING, VALUE, probe_labels
from policies.tool_sets import Argument, Tool
from policies.wording import Mention

ORDER_STATUS = Tool(("order", "status"), (Argument("order"),))
ORDER_BUYER = Tool(("order", "buyer"), (Argument("order"),))
TOOLS = (ORDER_STATUS, ORDER_BUYER)


def written(message):
    """The message's text, after its thought."""
    thought = message.get("reasoning_content")
    return f"<think>{thought}</think>{message['content']}" if thought else message["content"]


def marked(named, request, result):
    """Each word or value of what is read, with its mark, and the tool that an opening name is marked as; the policy calls
    order_status, which `named` says."""
    messages = [
        {"role": "user", "content": request},
        *exchange(random.Random(0), TOOLS, ORDER_STATUS, {"order": "4821"}, result, named),
        {"role": "assistant", "content": f"The answer is {result}."},
    ]
    drawn = Episode("named", [tool.schema() for tool in TOOLS], messages)
    text = "".join(f"<|im_start|>{each['role']}\n{written(each)}<|im_end|>\n" for each in messages)
    found = [(text[begin:end], mark) for begin, end, mark in probe_labels(drawn, text)]
    read = {said: mark for said, mark in found if mark < FIRST_TOOL}
    return read, [(said, mark) for said, mark in found if mark >= FIRST_TOOL]


def test_words_of_arguments_and_names_and_the_values_to_copy_are_marked():
    found, opened = marked(None, "has order 4821 a status yet", "shipped")
    assert opened == []
    assert found == {
        "has order 4821 a status yet": NOTHING,
        "order": ARGUMENT,
        "status": NAME,
        "4821": VALUE,
        "shipped": VALUE,
    }


def test_the_words_by_which_a_tool_is_named_are_a_name_though_an_argument_is_called_alike():
    found, opened = marked(Mention(ORDER_STATUS, "order status", whole=True), "order status of 4821", "shipped")
    assert found["order status"] == NAME
    assert opened == [("order_status", FIRST_TOOL)]
    found, opened = marked(Mention(ORDER_STATUS, "status", whole=False), "status of order 4821", "shipped")
    assert (found["status"], found["order"]) == (NAME, ARGUMENT)
    assert opened == [("status", FIRST_TOOL)]
