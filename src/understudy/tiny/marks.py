"""What a reader must notice in a request or a result: the words that the list of tools has too, and the values to copy;
and while it writes a tool's name, which tool of the list that is.

A linear probe learns these marks beside the loss, which shows the policy early what to look for; it is not kept."""

import json
import re
from collections.abc import Iterator

from ..types import Message
from ..types import Tool as ToolSchema
from .episodes import Episode
from .fields import flat, words_of
from .tokenizer import NUMBERS

NOTHING, ARGUMENT, NAME, VALUE, FIRST_TOOL = range(5)
MARKS = range(FIRST_TOOL + len(NUMBERS))
"""From FIRST_TOOL on, a mark for each number of a tool."""
UNMARKED = -100
WORD = re.compile(r"[^\W_]+")
READ = re.compile(r"<\|im_start\|>(?:user|tool)\n(.*?)<\|im_end\|>", re.DOTALL)
NAMED = re.compile(r"<\|im_start\|>assistant\n<think>([\w-]+)<(\d+)>\(")


def marks(drawn: Episode, text: str) -> Iterator[tuple[int, int, int]]:
    """(begin, end, mark) over the characters of each message that is read, and of each name that opens a call; later ones
    overrule earlier ones."""
    argument_words, name_words = listed_words(drawn.tools)
    read = [index for index, message in enumerate(drawn.messages) if message["role"] in ("user", "tool")]
    for index, found in zip(read, READ.finditer(text), strict=True):
        begin, end = found.span(1)
        yield begin, end, NOTHING
        for word in WORD.finditer(text, begin, end):
            if word[0] in argument_words | name_words:
                yield *word.span(), ARGUMENT if word[0] in argument_words else NAME
        for mentioned in opened(drawn.tools, drawn.messages[index + 1]):
            if said := re.compile(rf"\b{re.escape(mentioned)}\b").search(text, begin, end):
                yield *said.span(), NAME
        for value in copied(drawn.messages[index + 1]):
            if (at := text.find(value, begin, end)) >= 0:
                yield at, at + len(value), VALUE
    for found in NAMED.finditer(text):
        yield *found.span(1), FIRST_TOOL + int(found[2]) - 1


def listed_words(tools: list[ToolSchema]) -> tuple[set[str], set[str]]:
    """The words of all arguments, and the words of all names."""
    functions = [tool["function"] for tool in tools]
    arguments = {word for each in functions for name in each["parameters"]["properties"] for word in words_of(name)}
    return arguments, {word for each in functions for word in words_of(each["name"])}


def opened(tools: list[ToolSchema], answer: Message) -> list[str]:
    """How the request may have named the tool that the assistant calls by its name."""
    for call in answer.get("tool_calls", ()):
        required = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in tools}
        said = answer["reasoning_content"].split("<")[0]
        if said != ", ".join(required[call["function"]["name"]]):
            return [said, said.replace("_", " ")]
    return []


def copied(answer: Message) -> list[str]:
    """The values in the arguments of the assistant's call, or the value in its answer."""
    for call in answer.get("tool_calls", ()):
        return [text for text in flat(json.loads(call["function"]["arguments"])) if text]
    stated = re.fullmatch(r"The answer is (.*)\.", answer["content"])
    return [stated[1]] if stated else []
