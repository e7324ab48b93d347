"""The worked examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

CONVERSIONS = [
    "offbook.base.choices",  # a choice -> a message
    "offbook.commands.generated_options",  # the fields of a class -> options
    "offbook.base.devices",  # compute capabilities -> a precision
    "offbook.commands.doctor",  # bytes -> GiB
    "offbook.engine.inference.chat.thoughts",  # text -> thought and answer
    "offbook.engine.inference.chat.tool_calls",  # text -> tool calls
    "offbook.engine.inference.decoding.kv_cache",  # tokens -> common prefix
    "offbook.engine.sampling",  # logprobs -> tokens
    "offbook.engine.inference.decoding.generation",  # text -> text before a stop string
    "offbook.engine.inference.vllm.command",  # arguments -> words
    "offbook.engine.token_tree",  # calls -> token tree
    "offbook.engine.learner.targets.advantage",  # rewards -> advantages
    "offbook.engine.learner.targets.batch",  # trajectories -> targets
    "offbook.engine.learner.rows.layouts",  # targets -> rows
    "offbook.engine.learner.update.loss",  # trajectories -> divisors
    "offbook.base.errors",  # where the package came from -> a pip command
    "offbook.memory_plan.parts",  # config.json -> numbers of weights; a size -> bytes
    "offbook.base.user_values",  # an object -> text
    "offbook.base.text",  # a count and a noun -> text
    "offbook.quickstart.run",  # a tool call -> its arguments
    "offbook.rewards.reward_result",  # a return value -> a reward
    "offbook.rewards.reward_parts",  # parts -> a reward
    "offbook.processes.command",  # a scenario -> placeholders; a template -> text
    "offbook.commands.serve",  # values of options -> ServerOptions
    "offbook.server.errors",  # an error -> an HTTP status
    "offbook.server.base_model",  # a base's name -> what an adapter names as its base
    "offbook_dashboard.conversation",  # messages -> text
    "offbook_dashboard.page_urls",  # names -> addresses
    "offbook.server.views.numbers",  # numbers -> text
    "offbook.server.views.run_summary",  # values -> points of a line
    "offbook_dashboard.step_groups",  # deviations -> CSS classes
    "offbook_dashboard.token_pieces",  # bytes -> text
    "offbook_dashboard.token_view",  # advantages -> text
    "offbook.server.records.call_rows",  # tokens -> blobs
    "offbook.server.records.claims",  # ids -> statements
    "offbook.server.sampler.transport",  # a request -> the largest answer
    "offbook.server.sampler.transport",  # an error response -> its message
    "offbook.engine.learner.model.merge",  # a configuration -> one that older readers know
    "offbook.server.training.jobs",  # recorded calls -> the learner's samples
    "policies.episodes",  # right completions -> their probabilities
    "policies.evaluate",  # a completion -> its call; probabilities -> their spread
    "policies.evaluate_services",  # arguments -> their kinds
    "policies.fields",  # a name -> its words; a value -> its strings
    "policies.service_requests",  # a word -> its offset in a name
    "policies.service_tools",  # a JSON Schema -> a signature
    "policies.services",  # a value -> an answer
    "policies.tool_sets",  # a tool -> its signature
    "policies.train",  # characters -> tokens
    "offbook.trainer.evaluate",  # successes -> pass@k
]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_examples_of_a_conversion_print_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert result.attempted > 0, f"{name} has no example"
    assert result.failed == 0
