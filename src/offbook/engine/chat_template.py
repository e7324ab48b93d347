"""A model's chat template: the one way from messages to a prompt's text, for both samplers and for the learner.

Messages come in OpenAI's format. What a template cannot express is mapped to what it can, the same for every engine; text
that still reaches no prompt is an error, because a policy must not be trained without it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers' tokenizers are only partly typed.

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, cast

from transformers import GenerationConfig, PreTrainedTokenizerBase

from offbook.base.errors import ConfigError
from offbook.base.json_files import parse_json
from offbook.base.types import Json, Message, Tool
from offbook.openai_dialect.chat_fields import in_order_of_calls

from .control_tokens import ControlTokens
from .inference.chat.requests import shortened
from .inference.chat.tool_calls import MARKS

_TELLS_STRINGS = re.compile(r"arguments\s+is\s+(not\s+)?(string|mapping)")
_KNOWS_DEVELOPER = re.compile(r"""["']developer["']""")
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_THOUGHT_END = "</think>"
_TODAY = "strftime_now"
"""The function by which templates ask for the date."""
_BESIDE, _CALL = "the text beside its tool calls", "a tool call"
_TOOL_FIELDS = ("name", "description", "parameters", "strict")

Options = Mapping[str, Json]
NO_OPTIONS: Options = MappingProxyType({})
Form = Literal["plain", "json", "squeezed"]
"""How a text stands in a prompt: as it is, as the inside of a JSON string, or with other whitespace."""


class PromptError(ConfigError):
    """Messages that do not fit the chat template. The message names the first one that does not."""


@dataclass(frozen=True)
class _Style:
    """What a template does with messages, from probes.

    `short_ids`: it takes ids of calls of nine letters and digits alone.
    `text_beside_calls`: `split` if it needs an assistant message of its own, `lost` if the template cannot carry it.
    """

    raw_arguments: bool
    developer: bool
    several_systems: bool
    names: bool
    calls: bool
    short_ids: bool
    text_beside_calls: Literal["carried", "split", "lost"]
    tools: bool


def end_tokens(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    """The tokens that end a turn: the tokenizer's and those of the model's generation config. The sampler stops at them, and
    the learner cuts there."""
    own = getattr(generation, "eos_token_id", None)
    ids: list[object] = [*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id]
    return frozenset(token for token in ids if isinstance(token, int))


class ChatTemplate:
    """The chat template of a tokenizer, which may have one by name for requests with tools (`tool_use`). Thread-safe.

    `call_marks`: the marks of tool calls that it writes. `date`: what a template that asks for today's date gets; None: today. `source`: a template to use instead of the tokenizer's own. Raises ConfigError if there is none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, date: datetime.date | None = None, source: str | None = None
    ) -> None:
        templates: object = source or tokenizer.chat_template
        if not templates or not isinstance(templates, str | dict):
            raise ConfigError(
                "the model's folder has no chat template: add chat_template.jinja, or chat_template to tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._templates = {"": templates} if isinstance(templates, str) else cast(dict[str, str], templates)
        self._styles: dict[str, _Style] = {}
        self._date = date or datetime.date.today()
        written = "\n".join(self._templates.values())
        self._control = ControlTokens(tokenizer, written)
        self.call_marks = frozenset(mark for mark in MARKS if mark in written)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, options: Options = NO_OPTIONS
    ) -> str:
        """The text of a prompt for `encode`, with marks where messages spell control tokens (`shown` replaces them).
        `options`: variables of the template, and `add_generation_prompt`.

        Raises PromptError for messages that the template cannot render, and for text that it leaves out.
        """
        offered = [_tool(tool) for tool in tools or ()] or None
        template = self._template(offered)
        style = self._style(template)
        plain = [_plain(message, f"messages.{index}") for index, message in enumerate(messages)]
        try:
            ordered = in_order_of_calls(plain, answered=bool(options.get("add_generation_prompt")))
        except ConfigError as error:
            raise PromptError(str(error)) from error
        text = self._apply(template, *self._control.marked(_mapped(ordered, style), offered, options))
        self._check(plain, style, self.shown(text), offered)
        return text

    def warnings(self, end_ids: frozenset[int]) -> list[str]:
        """What trains a policy on something else than its user expects. `end_ids`: the model's end tokens."""
        warnings = self._control_warnings()
        if any(_TODAY in template for template in self._templates.values()):
            warnings.append(
                f"{self._named(None)} writes today's date into prompts: all prompts of this directory have "
                f"{self._date}, on every day (prompt_date)"
            )
        if not self._style(self._template([_PROBE_TOOL])).tools:
            warnings.append(
                f"{self._named([_PROBE_TOOL])} shows no tools: the policy does not see the tools that a request offers"
            )
        if not end_ids:
            warnings.append(
                "the model has no end token, so every answer runs to its length limit: set eos_token_id in "
                "generation_config.json to the token that ends an answer"
            )
        elif (end := self._end_of_answer()) and end_ids.isdisjoint(self.encode(end)):
            names = ", ".join(repr(str(self._tokenizer.decode([token]))) for token in sorted(end_ids))
            warnings.append(
                f"{self._named(None)} writes {end!r} after an answer, and none of the model's end tokens ({names}): a policy "
                "that answers like this runs to its length limit. Set eos_token_id in generation_config.json to the token that "
                "ends an answer"
            )
        return warnings

    def _control_warnings(self) -> list[str]:
        """How a message can begin a turn of its own in spite of `ControlTokens`."""
        warnings: list[str] = []
        if tokens := self._control.unprotected(self._tokenizer):
            names = ", ".join(tokens[:5]) + (f" and {len(tokens) - 5} more" if len(tokens) > 5 else "")
            warnings.append(
                f"the tokenizer of {self._tokenizer.name_or_path or 'the base'} makes control tokens of text that spells them "
                f"({names}): a message can begin a turn of its own"
            )
        try:
            text = self._apply(self._template(None), [_USER, _ANSWER, _NEXT], None, NO_OPTIONS)
        except PromptError:
            return warnings
        between = text.partition(str(_USER["content"]))[2].partition(str(_ANSWER["content"]))[0]
        if between and not self._control.are_in(between):
            warnings.append(
                f"{self._named(None)} begins turns with plain text ({between.strip()!r}) and no control token: a message can "
                "begin a turn of its own"
            )
        return warnings

    def _end_of_answer(self) -> str:
        """The text after an answer, before the next message and at the end; empty if the template renders neither."""
        answer, following = str(_ANSWER["content"]), str(_NEXT["content"])
        try:
            between, last = (
                self._apply(self._template(None), messages, None, NO_OPTIONS)
                .partition(answer)[2]
                .partition(following)[0]
                for messages in ([_USER, _ANSWER, _NEXT], [_USER, _ANSWER])
            )
        except PromptError:
            return ""
        return last if last == between[: len(last)] and last.strip() else last + between

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The tokens of a rendered text, or of another one, in which spellings are control tokens. `special`: with those
        that the tokenizer puts before and after a text of its own."""
        marked = self._control.encode(text)
        return self._tokenizer.encode(text, add_special_tokens=special) if marked is None else marked

    def shown(self, text: str) -> str:
        """A rendered text as the policy reads it."""
        return self._control.shown(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _template(self, tools: Sequence[Tool] | None) -> str:
        """The template for requests with or without tools, as transformers chooses it. Raises PromptError."""
        names = ("", "tool_use", "default") if tools else ("", "default")
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise PromptError(
            f"the model has the chat templates {sorted(self._templates)} but none named 'default', which a request "
            "without tools needs: add it to additional_chat_templates"
        )

    def _named(self, tools: Sequence[Tool] | None) -> str:
        template, base = self._template(tools), self._tokenizer.name_or_path
        name = next(name for name, text in self._templates.items() if text == template)
        return f"the chat template{f' {name!r}' if name else ''}{f' of {base}' if base else ''}"

    def _apply(self, template: str, messages: Sequence[Message], tools: Sequence[Tool] | None, options: Options) -> str:
        dated: dict[str, Json] = {_TODAY: self._today} if _TODAY in template else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,  # pyright: ignore[reportArgumentType]  # JSON schemas, as transformers' own docs pass them
                    chat_template=template,
                    tokenize=False,
                    **dated,
                    **options,
                )
            )
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise PromptError(f"messages do not fit the chat template: {error}") from error

    def _today(self, form: str) -> str:
        """The date for templates, in place of the day on which a prompt is rendered: those of one run must be alike."""
        return datetime.datetime.combine(self._date, datetime.time()).strftime(form)

    # ---- what the template does with messages

    def _style(self, template: str) -> _Style:
        style = self._styles.get(template)
        if style is None:
            style = self._styles[template] = self._probe(template)
        return style

    def _probe(self, template: str) -> _Style:
        """Render short conversations, with texts that no template contains."""

        def text(*messages: Message, tools: Sequence[Tool] | None = None) -> str | None:
            try:
                return self._apply(template, messages, tools, NO_OPTIONS)
            except PromptError:
                return None

        def carried(words: str, *messages: Message, tools: Sequence[Tool] | None = None) -> bool:
            rendered = text(*messages, tools=tools)
            return rendered is not None and all(word in rendered for word in words.split())

        first: Message = {"role": "system", "content": "alpha-probe"}
        second: Message = {"role": "system", "content": "beta-probe"}
        called: Message = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
        both: Message = called | {"content": "gamma-probe"}
        after: tuple[Message, ...] = (_PROBE_RESULT, _ANSWER, _NEXT)
        alone, beside = text(_USER, called, _NEXT), "carried"
        if carried("call-probe", _USER, called, *after) and not carried("gamma-probe call-probe", _USER, both, *after):
            beside = "split" if carried("gamma-probe call-probe", _USER, *_split(both), *after) else "lost"
        return _Style(
            raw_arguments=bool(_TELLS_STRINGS.search(template)),
            developer=bool(_KNOWS_DEVELOPER.search(template)),
            several_systems=carried("alpha-probe beta-probe", first, second, _USER)
            and carried("alpha-probe beta-probe", first, _USER, _ANSWER, second, _NEXT),
            names=carried("delta-probe", _USER | {"name": "delta-probe"}),
            calls=alone is None or "call-probe" in alone,
            short_ids=text(_USER, called) is not None
            and text(_USER, called | {"tool_calls": [_PROBE_CALL | {"id": "call_0"}]}) is None,
            text_beside_calls=beside,
            tools=carried(_PROBE_TOOL["function"]["name"], _USER, tools=[_PROBE_TOOL]),
        )

    def _check(self, messages: Sequence[Message], style: _Style, text: str, tools: Sequence[Tool] | None) -> None:
        prompt = _Prompt(text)
        for index, message in enumerate(messages):
            for what, part in _texts(message):
                lost = (what == _BESIDE and style.text_beside_calls == "lost") or (what == _CALL and not style.calls)
                if lost or not prompt.has(part, message["role"]):
                    raise PromptError(
                        f"messages.{index} ({message['role']}): {what} reaches no prompt, since {self._named(tools)} leaves "
                        f"it out: {shortened(part)}. Send it in another message, leave it out, or use a base whose template "
                        "has a place for it"
                    )


class _Prompt:
    """Searches the text of a prompt for those of messages, in their order: on the whole, reads the prompt once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 0  # of the last text found
        self._forms: dict[str, Form] = {}  # by role, since a template writes all messages of a role alike

    def has(self, part: str, role: str) -> bool:
        """Whether the prompt contains the text, perhaps escaped as in JSON, or with other whitespace."""
        forms: list[Form] = ["plain", "json"]
        forms.sort(key=lambda form: form != self._forms.get(role))
        for form in forms:
            written = part if form == "plain" else json.dumps(part, ensure_ascii=False)[1:-1]
            start = self._text.find(written, self._end)
            if start < 0:
                start = self._text.find(written, 0, self._end)
            if start >= 0:
                self._end, self._forms[role] = start + len(written), form
                return True
        return "".join(part.split()) in self._squeezed

    @cached_property
    def _squeezed(self) -> str:
        return "".join(self._text.split())


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    """The texts of a message that a prompt must contain, each with what it is. Thoughts of past turns are not among them:
    leaving them out is how families that think are trained."""
    content = str(message["content"])
    if message["role"] == "assistant":
        content = content.rpartition(_THOUGHT_END)[2]
    calls = cast(list[Json], message.get("tool_calls") or [])
    if content := content.strip():
        yield _BESIDE if calls else "the content", content
    for call in calls:
        yield _CALL, str(call["function"]["name"])


# ---- from OpenAI's format to the template's


def _mapped(messages: Sequence[Message], style: _Style) -> list[Message]:
    mapped: list[Message] = list(messages)
    if not style.developer:
        mapped = [message | {"role": "system"} if message["role"] == "developer" else message for message in mapped]
    if not style.names:
        mapped = _with_names(mapped)
    if not style.several_systems:
        mapped = _one_system(mapped)
    if style.text_beside_calls == "split":
        mapped = [
            part
            for message in mapped
            for part in (_split(message) if message.get("tool_calls") and message["content"].strip() else (message,))
        ]
    if style.short_ids:
        mapped = [_with_short_ids(message) for message in mapped]
    if not style.raw_arguments:
        mapped = [
            message | {"tool_calls": [_with_value(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in mapped
        ]
    return mapped


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Write names before texts: `Ann: text`. Not that of a tool, which its call has, nor that of a policy which is the only
    assistant here: it would read a name before what it sampled without one."""
    assistants = {message.get("name") for message in messages if message["role"] == "assistant"} - {None}
    unnamed = {"tool"} if len(assistants) > 1 else {"tool", "assistant"}
    return [
        message | {"content": f"{message['name']}: {message['content']}"}
        if message.get("name") and message["content"].strip() and message["role"] not in unnamed
        else message
        for message in messages
    ]


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """Join all system messages into one at the start, as vLLM does for templates without a `developer` role."""
    systems = [message for message in messages if message["role"] == "system"]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return list(messages)
    text = "\n\n".join(message["content"] for message in systems if message["content"])
    return [{"role": "system", "content": text}, *(message for message in messages if message["role"] != "system")]


def _split(message: Message) -> tuple[Message, Message]:
    text = {name: value for name, value in message.items() if name != "tool_calls"}
    return text, message | {"content": ""}


def _with_short_ids(message: Message) -> Message:
    """The message with ids of nine letters and digits, the same one for a call and its result."""
    if message.get("tool_calls"):
        return message | {"tool_calls": [call | _short_id(call, "id") for call in message["tool_calls"]]}
    return message | _short_id(message, "tool_call_id")


def _short_id(fields: Json, name: str) -> dict[str, str]:
    call_id = fields.get(name)
    if not isinstance(call_id, str) or _SHORT_ID.fullmatch(call_id):
        return {}
    return {name: hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]}


def _with_value(call: Json) -> Json:
    """The call with its arguments as a JSON value. Text that is not JSON stays as it is."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _plain(message: Message, where: str) -> Message:
    """A message in one spelling: content as text, no fields without a value, a thought under both of its names."""
    if not isinstance(message.get("role"), str):
        raise PromptError(f"{where}.role must be a string (got {shortened(message.get('role'))})")
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = _text(plain.get("content", plain.get("refusal")), f"{where}.content")
    thought = plain.get("reasoning", plain.get("reasoning_content"))
    if thought is not None:
        if not isinstance(thought, str):
            raise PromptError(f"{where}.reasoning must be text (got {shortened(thought)})")
        plain |= {"reasoning": thought, "reasoning_content": thought}  # templates use one or the other
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls") for call in calls]
    return plain


def _call(call: Json, where: str) -> Json:
    try:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        return {**call, "function": {**function, "name": str(function["name"]), "arguments": arguments}}
    except (TypeError, KeyError, AttributeError) as error:
        raise PromptError(f"{where}: {shortened(call)} is not a tool call ({error!r})") from error


def _text(content: Json, where: str) -> str:
    """Content as one text. Parts are joined by newlines, as in vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts: list[str] = []
        for place, part in enumerate(cast(list[Json], content)):
            fields = cast(dict[str, Json], part) if isinstance(part, dict) else {"text": part}
            text = fields.get("text", fields.get("refusal"))
            if not isinstance(text, str):
                kind = f"of type {shortened(fields.get('type'))}: " if isinstance(part, dict) else ""
                raise PromptError(f"{where}.{place}: only text parts are supported (got one {kind}{shortened(part)})")
            parts.append(text)
        return "\n".join(parts)
    raise PromptError(f"{where} must be text or a list of parts (got {shortened(content)})")


def _tool(tool: Tool) -> Tool:
    """A tool in one spelling, which does not depend on the order of its keys. vLLM reads tools like this."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    inner = cast(dict[str, Json], function)
    return {
        "type": "function",
        "function": {name: inner[name] for name in _TOOL_FIELDS if inner.get(name) is not None},
    }


_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": "tool-probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}
_PROBE_CALL: Json = {
    "id": "probe0000",  # nine characters, as Mistral's templates demand
    "type": "function",
    "function": {"name": "call-probe", "arguments": {}},
}
_PROBE_RESULT: Message = {"role": "tool", "content": "result", "tool_call_id": "probe0000", "name": "call-probe"}
_USER: Message = {"role": "user", "content": "question"}
_ANSWER: Message = {"role": "assistant", "content": "epsilon-probe"}
_NEXT: Message = {"role": "user", "content": "zeta-probe"}
