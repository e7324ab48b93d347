"""Every reader of texts that models, tools and strangers write: it ends in linear time and raises nothing but its own errors."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from offbook.base.errors import RolloutError
from offbook.base.json_files import DEEPEST, parse_json
from offbook.base.redaction import is_secret, keys_in, mask_personal, redact
from offbook.base.text import encodable, one_line, printable
from offbook.base.types import History, RolloutException
from offbook.client.rollouts.failures import failure_kinds
from offbook.engine.chat_template import _with_value
from offbook.engine.inference.chat.tool_calls import HermesParser, read_llama, read_mistral
from offbook.llms.json_answers import read
from offbook.openai_dialect.tool_arguments import arguments_object
from offbook.processes.command import _number
from offbook.rewards.judge_prompt import judge_prompt
from offbook.rewards.reward_parts import answer_fault, exact_match, numeric_match
from offbook.rewards.transcripts import Transcript
from offbook.server.records.claims import _answer
from offbook_dashboard.conversation import indented
from offbook_mcp.scenarios.execution import reads_like_error
from offbook_mcp.scenarios.harvest import is_empty, leaves_of, values_for
from offbook_mcp.tools.result_values import digest_of, scalars_of, structure_of
from offbook_mcp.tools.rollout_tools import bounded_text
from offbook_mcp.training.agent_loop import parsed
from offbook_mcp.training.rewards import answer_score, argument_score
from offbook_sinks.spans import _parsed

LENGTH = 50_000
CPU_SECONDS = 5.0
"""A linear reader takes less than a tenth of it; one whose steps grow with the square, minutes."""


class Verdict(BaseModel):
    """What a judge is asked for."""

    score: float


def called(text: str) -> dict[str, Any]:
    """A message with a tool call whose arguments are the text."""
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": text}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def hermes(text: str) -> None:
    parser = HermesParser()
    for start in range(0, len(text), 1_000):
        parser.push(text[start : start + 1_000])
    parser.finish(truncated=False)


def judged(text: str) -> None:
    shown = [
        Transcript.of([History(messages_and_choices=[{"role": "user", "content": text + end}])], "x") for end in "ab"
    ]
    judge_prompt(shown, "", max_tokens=4_000)


def scored(text: str) -> None:
    if (arguments := parsed(text)) is not None:
        argument_score(arguments, arguments, {})
        json.dumps(list(scalars_of(arguments)))


READERS: dict[str, Callable[[str], object]] = {
    "result of a tool": structure_of,
    "digest": digest_of,
    "harvest": lambda text: leaves_of("find", {}, bounded_text(text, 10**6)),
    "emptiness": lambda text: is_empty(bounded_text(text, 10**6)),
    "error text": lambda text: reads_like_error("find", {"a": "b"}, bounded_text(text, 10**6), None),
    "description": lambda text: values_for("a", text, text),
    "expected answer": lambda text: answer_score(["5", text[:50]], text),
    "arguments": scored,
    "hermes": hermes,
    "llama": read_llama,
    "mistral": read_mistral,
    "arguments for other APIs": lambda text: orjson.dumps({"a": [arguments_object(text)]}),
    "arguments for a template": lambda text: json.dumps(_with_value(called(text)["tool_calls"][0])),
    "judge's answer": lambda text: read(text, Verdict),
    "transcript": judged,
    "redaction": lambda text: (redact(text), keys_in(text), is_secret("A", text)),
    "personal data": mask_personal,
    "terminal": lambda text: (printable(text), encodable(text, "ascii"), one_line(text)),
    "unnamed choice": lambda text: _answer(called(text)),
    "dashboard": indented,
    "span": lambda text: json.dumps(_parsed(text)),
    "JSON reward": answer_fault,
    "other rewards": lambda text: (numeric_match(text, 3.0), exact_match(text, "a")),
    "reward file": lambda text: _number(text, "a program"),
    "failures": lambda text: failure_kinds([RolloutException(type="E", message=text, traceback=text)]),
}
OWN_ERRORS: dict[str, type[Exception]] = {
    "judge's answer": ValueError,
    "reward file": RolloutError,
    "transcript": RolloutError,
}


def filled(part: str) -> str:
    """The part again and again."""
    return (part * (LENGTH // len(part) + 1))[:LENGTH]


def wrapped(opening: str, inside: str, closing: str, levels: int) -> str:
    """A text with so many levels."""
    return opening * levels + inside + closing * levels


RUNS = [
    *(
        "[",
        "]",
        "{",
        "(",
        "<",
        '"',
        "'",
        "\\",
        "`",
        "-",
        "|",
        " ",
        "\n",
        "1",
        "a",
        "A_",
        "*",
        "\u3000",
        "é",
        "://a:",
        "sk-",
        "eyJ",
    ),
    *(
        "```x\n",
        "```\n",
        "a: b\n",
        "a | b\n",
        "a, ",
        "<a>",
        "{a} ",
        "x=(",
        "not ",
        "- ",
        "-----BEGIN ",
        "data: x\n",
        "\r\n",
        "\r",
    ),
    *(
        "<think>",
        "<tool_call>",
        '<tool_call>{"',
        "<tool_call></tool_call>",
        "[TOOL_CALLS]a[ARGS]{}",
        '{"b": 1} ',
        "[1,",
        '{"a":',
    ),
]
WORST = {
    **{f"many {part!r}": filled(part) for part in RUNS},
    **{f"{levels} lists": wrapped("[", "", "]", levels) for levels in (90, 200, 500, 900, LENGTH)},
    **{f"{levels} objects": wrapped('{"a":', "1", "}", levels) for levels in (200, 400, 900, LENGTH // 6)},
    **{f"{levels} elements": wrapped("<a>", "b", "</a>", levels) for levels in (200, 950, LENGTH // 7)},
    "deep Python": wrapped("[({", "1", "})]", 60),
    "deep lines": f"{wrapped('[', '', ']', 190)}\n" * 100,
    "signs": f"[{'-' * LENGTH}1]",
    "siblings": f"<a>{'<b/>' * (LENGTH // 4)}</a>",
    "other siblings": f"<a>{''.join(f'<b{n}/>' for n in range(LENGTH // 8))}</a>",
    "keys": json.dumps({f"k{n}": n for n in range(LENGTH // 12)}),
    "equal keys": "{" + ",".join(['"a":1'] * (LENGTH // 6)) + "}",
    "calls": f"[TOOL_CALLS] {json.dumps([{'name': 'f', 'arguments': {'a': n}} for n in range(LENGTH // 40)])}",
    "other calls": ";".join(json.dumps({"name": "f", "parameters": {"a": n}}) for n in range(LENGTH // 40)),
    "a rule that is none": f"|a|b|\n{'-' * LENGTH}x",
    "a gap": f"a,{' ' * LENGTH}b and c",
    "a fence with a gap": f"```\n{' ' * LENGTH}x",
    "an integer": "1" * LENGTH,
    "an integer of 4,300 digits": f"[{'1' * 4_300}]",
    "a hexadecimal integer": f"[0x{'f' * LENGTH}]",
    "a hexadecimal key": f"{{0x{'f' * LENGTH}: 1}}",
    "no numbers": "[NaN, Infinity, -Infinity, 1e999, null]",
    "no set": "{ {1: [2]}, ({3: 4},)}",
    "no key": "{ {(): []}: 1, {(1, [2])}: 3}",
    "NUL": "\0" * LENGTH,
    "surrogates": '{"a": "\\ud800"}',
    "mixed newlines": "a\rb\r\nc\x85d\u2028e\x0bf\x0cg\n" * (LENGTH // 20),
}


class TooSlowError(Exception):
    """A reader took more than CPU_SECONDS."""


@contextmanager
def bounded() -> Iterator[None]:
    """Raises TooSlowError in the block after CPU_SECONDS of this process's own time, however busy the machine is."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def survived(reader: str, text: str) -> str:
    """What a reader did wrong; "" for nothing."""
    try:
        with bounded():
            READERS[reader](text)
    except OWN_ERRORS.get(reader, ()):
        return ""
    except Exception as error:  # noqa: BLE001  # each is a fault
        return f"{type(error).__name__}: {error}"[:200]
    return ""


SLOW_ONCE = [
    *(
        ("digest", name)
        for name in ("a rule that is none", "many '```x\\n'", "other siblings", f"{LENGTH // 7} elements")
    ),
    *(
        ("digest", "a hexadecimal integer"),
        ("harvest", "a gap"),
        ("failures", "many ' '"),
    ),
    *(("judge's answer", name) for name in ("a fence with a gap", "keys", f"{LENGTH} lists")),
    *(
        ("mistral", "calls"),
        ("arguments for other APIs", "900 lists"),
        ("span", f"{LENGTH} lists"),
    ),
    *(
        ("arguments", "900 objects"),
        ("unnamed choice", f"{LENGTH} lists"),
        ("arguments for a template", f"{LENGTH} lists"),
    ),
]
"""Readers that needed time with the square of a text's length or more, or raised, and the texts that showed it."""


@pytest.fixture(scope="module", autouse=True)
def _without_inflect() -> Iterator[None]:
    """`inflect` takes a second to import, which is no reader's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbook_mcp.scenarios.harvest._singular_noun", lambda: lambda word: False)
        yield


@pytest.mark.parametrize(("reader", "text"), SLOW_ONCE)
def test_a_text_that_stopped_its_reader_is_read(reader: str, text: str) -> None:
    assert not survived(reader, WORST[text])


@pytest.mark.slow("the worst texts")
@pytest.mark.parametrize("reader", READERS)
def test_the_worst_texts_are_read_in_linear_time_and_raise_nothing(reader: str) -> None:
    faults = {name: fault for name, text in WORST.items() if (fault := survived(reader, text))}
    assert not faults


PARTS = [
    *"[]{}()<>\"'\\,:=|`-/* \n\r\t01aé.",
    "```",
    "<a>",
    "</a>",
    "0x",
    "1e9",
    '"a":',
    "NaN",
    "null",
    "<!",
    "]]>",
    "<tool_call>",
]
PARTS += [
    "</tool_call>",
    "[TOOL_CALLS]",
    '{"name": "a", "arguments": ',
    "not ",
    "lambda: ",
    "{}",
    "[]",
    "\0",
    "\u2028",
    "\U0001f600",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=40).map("".join))
def test_no_text_raises_outward(text: str) -> None:
    assert not {reader: fault for reader in READERS if (fault := survived(reader, text))}


def test_json_of_others_is_read_to_a_depth_that_everything_can_walk_through() -> None:
    assert parse_json(wrapped("[", "", "]", DEEPEST)) is not None
    for text in (wrapped("[", "", "]", DEEPEST + 2), wrapped('{"a":', "1", "}", 10**5), "1" * 10**5, "{", "\0"):
        with pytest.raises(ValueError, match=r"."):
            parse_json(text)


class Repeating(random.Random):
    """Draws the first of everything, so that codes of one length are always the same."""

    def choice(self, seq: Any) -> Any:
        return seq[0]

    def choices(self, population: Any, *_: Any, k: int = 1, **__: Any) -> list[Any]:
        return [population[0]] * k


def test_a_rollout_that_holds_every_code_of_a_judge_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbook.rewards.judge_prompt.random.Random", Repeating)
    with bounded():
        prompt = judge_prompt(
            [Transcript.of([History(messages_and_choices=[{"role": "user", "content": "b" * 30}])], "x")],
            "",
            max_tokens=4_000,
        )
    assert prompt.ids == ("b" * 32,)
