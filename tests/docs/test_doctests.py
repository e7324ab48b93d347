"""The worked examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

CONVERSIONS = [
    "understudy.choices",  # a choice -> a message
    "understudy.devices",  # compute capabilities -> a precision
    "understudy.doctor.examine",  # bytes -> GiB
    "understudy.engine.inference.chat.hermes",  # text -> tool calls
    "understudy.engine.inference.chat.thoughts",  # text -> thought and answer
    "understudy.engine.inference.chat.tool_calls",  # text -> tool calls
    "understudy.engine.inference.decoding.prefix_cache",  # tokens -> common prefix
    "understudy.engine.inference.decoding.sampling",  # logprobs -> tokens
    "understudy.engine.inference.decoding.text",  # text -> text before a stop string
    "understudy.engine.inference.vllm.command",  # arguments -> words
    "understudy.engine.token_tree",  # calls -> token tree
    "understudy.engine.learner.advantage",  # rewards -> advantages
    "understudy.engine.learner.batch",  # trajectories -> targets
    "understudy.engine.learner.layouts",  # targets -> rows
    "understudy.engine.learner.loss",  # trajectories -> divisors
    "understudy.extras",  # where the package came from -> a pip command
    "understudy.memory_plan.base_shape",  # config.json -> numbers of weights
    "understudy.memory_plan.card",  # a size -> bytes
    "understudy.plain_values",  # an object -> text
    "understudy.plurals",  # a count and a noun -> text
    "understudy.quickstart.story",  # a tool call -> its arguments
    "understudy.rewards.agreement",  # two scorings -> Kendall's tau
    "understudy.rewards.outcome",  # a return value -> a reward
    "understudy.rewards.parts",  # parts -> a reward
    "understudy.server.arguments",  # argv -> options
    "understudy.server.errors",  # an error -> an HTTP status
    "understudy.server.models.base_model",  # a base's name -> what an adapter names as its base
    "understudy.server.pages.conversation",  # messages -> text
    "understudy.server.pages.links",  # names -> addresses
    "understudy.server.pages.numbers",  # numbers -> text
    "understudy.server.pages.trend",  # values -> points of a line
    "understudy.server.pages.step_groups",  # deviations -> CSS classes
    "understudy.server.pages.token_pieces",  # bytes -> text
    "understudy.server.pages.token_view",  # advantages -> text
    "understudy.server.records.call_rows",  # tokens -> blobs
    "understudy.server.records.claims",  # ids -> statements
    "understudy.server.records.running_time",  # running time -> wall-clock time
    "understudy.server.sampler.answer_limits",  # a request -> the largest answer
    "understudy.server.sampler.transport",  # an error response -> its message
    "understudy.server.training.export_folders",  # a configuration -> one that older readers know
    "understudy.server.training.jobs",  # recorded calls -> the learner's samples
    "policies.episodes",  # right completions -> their probabilities
    "policies.evaluate",  # a completion -> its call; probabilities -> their spread
    "policies.evaluate_services",  # arguments -> their kinds
    "policies.fields",  # a name -> its words; a value -> its strings
    "policies.service_requests",  # a word -> its offset in a name
    "policies.service_tools",  # a JSON Schema -> a signature
    "policies.services",  # a value -> an answer
    "policies.tool_sets",  # a tool -> its signature
    "policies.train",  # characters -> tokens
    "understudy.trainer.statistics",  # successes -> pass@k
]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_the_examples_of_a_conversion_print_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert result.attempted > 0, f"{name} has no example"
    assert result.failed == 0
