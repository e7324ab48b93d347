"""A plugin of vLLM that renders messages as the learner does, bounds the blanks of JSON, and computes logprobs faster.

vLLM rewrites messages on its own way to the chat template: it parses and respaces the arguments of tool calls, hands
content to some templates in parts, and lets the template leave text out. The plugin renders them with `ChatTemplate`, as the
embedded engine and the learner do. Here its check of the prompt costs least, because vLLM renders the prompt in this process
anyway; the gateway would have to render it a second time.

vLLM's grammars of JSON allow any white space, which a policy learns to repeat. vLLM ignores `disable_any_whitespace` in a
request, and as an option of the server it needs one grammar backend for all schemas, and no backend takes all. The plugin
allows one blank between the tokens of JSON, as the embedded engine does, or none with the backend that has no such bound.

A recorded call needs the logprob of each sampled token and no alternatives. For these vLLM decodes each token again, and
creates several objects per token. The plugin replaces the functions that do.

vLLM loads this module in each of its processes (entry point `vllm.general_plugins`). It has an effect only in a vLLM that
Offbook starts, and only in the tested version. Other answers stay the same, except for requests with `FLAT_LOGPROBS`: vLLM
then returns logprobs as the flat list `logprobs.token_logprobs`, and no `content`.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from offbook.base.errors import ConfigError
from offbook.openai_dialect.chat_fields import in_order_of_calls

from ...protocol import FLAT_LOGPROBS, UNKNOWN_LOGPROB

if TYPE_CHECKING:
    from ...chat_template import ChatTemplate

SWITCH = "OFFBOOK_VLLM_PLUGIN"
"""Environment variable that turns the plugin on (1)."""
PROMPT_DATE = "OFFBOOK_PROMPT_DATE"
"""Environment variable with the date for chat templates that ask for today's."""
KNOWN_VERSION = "0.32"

Function = Callable[..., Any]
"""A function of vLLM, whose types are not annotated."""


def register() -> None:
    """Replace vLLM's functions. vLLM calls this in each process."""
    if os.environ.get(SWITCH) != "1":
        return
    import vllm

    if not vllm.__version__.startswith(KNOWN_VERSION):
        _print_line(
            f"vLLM {vllm.__version__} runs without Offbook's plugin, which supports {KNOWN_VERSION} only: it renders messages "
            "in its own way, without a check that their text is in the prompt, and computes logprobs more slowly"
        )
        return
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.renderers.hf import HfRenderer
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from xgrammar import GrammarCompiler

    methods: list[tuple[Any, str, Callable[[Function], Any]]] = [
        (HfRenderer, "render_messages_async", wrap_render_messages),
        (LogprobsProcessor, "from_new_request", wrap_from_new_request),
        (LogprobsProcessor, "_update_sample_logprobs", wrap_update_sample_logprobs),
        (OpenAIServingChat, "_create_chat_logprobs", wrap_create_chat_logprobs),
        (GrammarCompiler, "compile_json_schema", wrap_compile_json_schema),
        (GrammarCompiler, "compile_structural_tag", wrap_compile_structural_tag),
        (GuidanceBackend, "compile_grammar", wrap_compile_grammar),
    ]
    for owner, name, ours in methods:
        setattr(owner, name, ours(getattr(owner, name)))
    _print_line(
        "Offbook's plugin renders messages, bounds the blanks of JSON, and computes the logprobs of sampled tokens, in process "
        f"{os.getpid()}"
    )


def wrap_render_messages(original: Function) -> Function:
    """Replace `HfRenderer.render_messages_async` for messages of text. Those with images are rendered by vLLM, with results
    of tools in order."""
    templates: WeakKeyDictionary[Any, ChatTemplate] = WeakKeyDictionary()
    named = os.environ.get(PROMPT_DATE)
    date = datetime.date.fromisoformat(named) if named else None

    @wraps(original)
    async def render_messages_async(self: Any, messages: Any, params: Any) -> Any:
        from vllm.exceptions import VLLMValidationError
        from vllm.renderers.chat_utils import has_non_text_content
        from vllm.renderers.hf import resolve_chat_template
        from vllm.renderers.inputs.preprocess import parse_dec_only_prompt
        from vllm.utils.async_utils import make_async

        from ...chat_template import ChatTemplate  # loads transformers, which the launcher of vLLM does without

        listed = [_listed(message) for message in messages]
        options: dict[str, Any] = params.get_apply_chat_template_kwargs()
        if has_non_text_content(listed) or options.pop("tokenize", False):
            try:
                ordered = in_order_of_calls(listed, answered=bool(options.get("add_generation_prompt")))
            except ConfigError as error:
                raise VLLMValidationError(str(error), parameter="messages") from error
            return await original(self, ordered, params)
        tools, source = options.pop("tools", None), options.pop("chat_template", None)
        del options["return_dict"]

        def render() -> str | list[int]:
            tokenizer = self.get_tokenizer()
            if source is not None or not tokenizer.chat_template:  # vLLM knows templates for some bases without one
                text = resolve_chat_template(tokenizer, source, tools, model_config=self.model_config)
                template = ChatTemplate(tokenizer, date, text)
            elif self in templates:
                template = templates[self]
            else:
                template = templates[self] = ChatTemplate(tokenizer, date)
            rendered = template.render(listed, tools, options)
            # vLLM encodes a text itself, and would make control tokens of those that messages spell.
            return rendered if template.shown(rendered) == rendered else template.encode(rendered)

        try:
            prompt = await self._render_with_timeout(make_async(render, executor=self._executor)())
        except ConfigError as error:
            raise VLLMValidationError(str(error), parameter="messages") from error
        return listed, parse_dec_only_prompt(prompt)

    return render_messages_async


def _listed(message: dict[str, Any]) -> dict[str, Any]:
    """A message with lists; pydantic makes some of them one-shot iterators."""
    return {
        **message,
        **{
            name: list(value)
            for name in ("content", "tool_calls")
            if not isinstance(value := message.get(name), str | None)
        },
    }


def wrap_compile_json_schema(original: Function) -> Function:
    """Replace the default of xgrammar's `max_whitespace_cnt`, any number, by one."""

    @wraps(original)
    def compile_json_schema(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{"max_whitespace_cnt": 1, **kwargs})

    return compile_json_schema


def wrap_compile_structural_tag(original: Function) -> Function:
    """The same for the JSON in a structural tag, as vLLM sends it for forced calls."""

    @wraps(original)
    def compile_structural_tag(self: Any, tag: Any, *args: Any) -> Any:
        one_blank = json.dumps(_with_one_blank(json.loads(tag))) if isinstance(tag, str) else tag
        return original(self, one_blank, *args)

    return compile_structural_tag


def wrap_compile_grammar(original: Function) -> Function:
    """Compile `GuidanceBackend`'s JSON without white space. vLLM gives it schemas that xgrammar does not take."""

    @wraps(original)
    def compile_grammar(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.disable_any_whitespace = True
        return original(self, *args, **kwargs)

    return compile_grammar


def _with_one_blank(part: object) -> object:
    """A structural tag of xgrammar in which JSON has at most one blank between its tokens. Schemas stay as they are."""
    if isinstance(part, list):
        return [_with_one_blank(item) for item in cast(list[object], part)]
    if not isinstance(part, dict):
        return part
    fields = cast(dict[str, object], part)
    if fields.get("type") == "json_schema":
        return {**fields, "max_whitespace_cnt": 1}
    return {name: _with_one_blank(value) for name, value in fields.items()}


class FlatLogprobs(list[float]):
    """The logprobs of a request with `FLAT_LOGPROBS`, where vLLM has one dict per token."""


def wrap_from_new_request(original: Function) -> Function:
    """Extend `LogprobsProcessor.from_new_request` to requests with `FLAT_LOGPROBS`."""

    @wraps(original)
    def from_new_request(tokenizer: Any, request: Any) -> Any:
        processor = original(tokenizer, request)
        extra: dict[str, Any] | None = request.sampling_params.extra_args
        if processor.num_logprobs == 0 and extra and extra.get(FLAT_LOGPROBS):
            processor.logprobs = FlatLogprobs()
        return processor

    return from_new_request


def wrap_update_sample_logprobs(original: Function) -> Function:
    """Replace `LogprobsProcessor._update_sample_logprobs` for `FlatLogprobs`, which stores only numbers."""

    @wraps(original)
    def update_sample_logprobs(self: Any, lists: Any) -> None:
        if not isinstance(self.logprobs, FlatLogprobs):
            return original(self, lists)
        values: list[float] = lists.logprobs[:, 0].tolist()
        self.logprobs.extend(values)
        self.cumulative_logprob += sum(values)

    return update_sample_logprobs


def wrap_create_chat_logprobs(original: Function) -> Function:
    """Replace `OpenAIServingChat._create_chat_logprobs` for `FlatLogprobs`, of a complete answer or of one chunk."""

    @wraps(original)
    def create_chat_logprobs(self: Any, token_ids: Any, top_logprobs: Any, *args: Any, **kwargs: Any) -> Any:
        if not top_logprobs or not isinstance(top_logprobs[0], float):
            return original(self, token_ids, top_logprobs, *args, **kwargs)
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionLogProbs

        values = [max(value, UNKNOWN_LOGPROB) for value in top_logprobs]
        return ChatCompletionLogProbs.model_construct(content=[], token_logprobs=values)

    return create_chat_logprobs


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # vLLM loads plugins before it configures logging
