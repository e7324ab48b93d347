"""Labels for the linear probe: what the policy must notice in a text before it can call a tool.

In a request or a result, these are words that the list of tools has too, and values to copy. In a thought, it is the
number of the tool whose name is being written. The probe is trained beside the policy and guides it early in training;
it is not saved."""

import json
import re
from collections.abc import Iterator

from offbook.base.types import Message
from offbook.base.types import Tool as ToolSchema

from .episodes import Episode
from .fields import flat, words_of
from .tokenizer import NUMBERS

NOTHING, ARGUMENT, NAME, VALUE, FIRST_TOOL = range(5)
LABELS = range(FIRST_TOOL + len(NUMBERS))
"""All labels. From FIRST_TOOL on, there is one per number of a tool."""
UNLABELLED = -100
"""Label of tokens that the probe is not trained on."""
WORD = re.compile(r"[^\W_]+")
READ = re.compile(r"<\|im_start\|>(?:user|tool)\n(.*?)<\|im_end\|>", re.DOTALL)
NAMED = re.compile(r"<\|im_start\|>assistant\n<think>([\w-]+)<(\d+)>\(")


def probe_labels(drawn: Episode, text: str) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, label) over characters of `text`, the rendered episode: for each request and result, and for
    each name of a tool at the start of a thought. Where ranges overlap, the later one holds."""
    argument_words, name_words = listed_words(drawn.tools)
    read = [index for index, message in enumerate(drawn.messages) if message["role"] in ("user", "tool")]
    for index, match in zip(read, READ.finditer(text), strict=True):
        begin, end = match.span(1)
        yield begin, end, NOTHING
        for word in WORD.finditer(text, begin, end):
            if word[0] in argument_words | name_words:
                yield *word.span(), ARGUMENT if word[0] in argument_words else NAME
        for mentioned in names_in_thought(drawn.tools, drawn.messages[index + 1]):
            if mention := re.compile(rf"\b{re.escape(mentioned)}\b").search(text, begin, end):
                yield *mention.span(), NAME
        for value in copied_values(drawn.messages[index + 1]):
            if (start := text.find(value, begin, end)) >= 0:
                yield start, start + len(value), VALUE
    for match in NAMED.finditer(text):
        yield *match.span(1), FIRST_TOOL + int(match[2]) - 1


def listed_words(tools: list[ToolSchema]) -> tuple[set[str], set[str]]:
    """The words of all arguments' names, and those of all tools' names."""
    functions = [tool["function"] for tool in tools]
    arguments = {
        word for function in functions for name in function["parameters"]["properties"] for word in words_of(name)
    }
    return arguments, {word for function in functions for word in words_of(function["name"])}


def names_in_thought(tools: list[ToolSchema], answer: Message) -> list[str]:
    """The spellings by which the request may have named the called tool: as in the thought, and with spaces. Empty when
    the thought starts with the required arguments, because then no tool was named."""
    for call in answer.get("tool_calls", ()):
        required = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in tools}
        thought = answer["reasoning_content"].split("<")[0]
        if thought != ", ".join(required[call["function"]["name"]]):
            return [thought, thought.replace("_", " ")]
    return []


def copied_values(answer: Message) -> list[str]:
    """The values in the arguments of the assistant's call, or the value in its answer."""
    for call in answer.get("tool_calls", ()):
        return [text for text in flat(json.loads(call["function"]["arguments"])) if text]
    stated = re.fullmatch(r"The answer is (.*)\.", answer["content"])
    return [stated[1]] if stated else []
