"""A rollout's and a group's page over a scripted sampler: what is shown without a learner, and that text stays text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from offbook import tiny
from offbook.base.types import Call
from offbook.server.views.numbers import MINUS
from offbook_dashboard.conversation import turns
from offbook_dashboard.token_pieces import TokenPieces
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import ScriptedChoice, ScriptedCompletion

MARKUP = "<script>alert(1)</script>"


async def rolled(gateway: Gateway, name: str, *, index: int = 0, reward: float | None = 1.0, **fields: Any) -> None:
    """A rollout of two calls with a tool result of markup between them."""
    use = {"id": "use-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "<b>"}'}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where is it?"}]
    headers = {"x-offbook-trajectory": name}
    gateway.sampler.completions.append(
        ScriptedCompletion((ScriptedChoice(tool_call=("look", '{"at": "<b>"}')),), prompt_ids=(1, 2, 3))
    )
    assert (await gateway.chat(headers, messages=messages)).status_code == 200
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [use]},
        {"role": "tool", "tool_call_id": "use-1", "content": MARKUP},
    ]
    gateway.sampler.completions.append(ScriptedCompletion(prompt_ids=(1, 2, 3, 11, 12, 13, 20)))
    assert (await gateway.chat(headers, messages=messages)).status_code == 200
    place = {"run": "run-1", "split": "train", "step": 0, "scenario": MARKUP, "group": "g-1", "index": index}
    record = {
        "id": name,
        "model": "default",
        "reward": reward,
        "started_at": 1_700_000_000.0,
        "ended_at": 1_700_000_002.0,
        "place": place,
        "metrics": {"part/right": 1.0},
        "logs": [f"RULER explanation: {MARKUP} is short"],
    } | fields
    answer = await gateway.http.post("/api/trajectories", json={"trajectories": [record]})
    assert answer.status_code == 200, answer.text


def without_answers(text: str) -> str:
    """A page without the tags of its tokens."""
    return re.sub(r'<span class="t[^"]*">([^<]*)</span>', r"\1", text)


async def test_a_rollout_shows_its_conversation_its_numbers_and_why_nothing_was_trained(gateway: Gateway) -> None:
    await rolled(gateway, "one")
    page = await gateway.http.get("/trajectories/one")
    assert page.status_code == 200
    text = page.text
    assert "Rollout 1" in text and "Where is it?" in text and "tool · look" in text
    assert "<dt>Reward</dt><dd>1.000 " in text and "<span>right</span> <strong>1</strong>" in text
    assert "No train request has this rollout" in text
    assert '"recorded": [-0.100000001' in text  # float32, every digit
    assert 'aria-current="true">Logprob</a>' in text


async def test_text_of_models_tools_names_and_judges_stays_text(gateway: Gateway) -> None:
    fault = {"type": MARKUP, "message": MARKUP, "traceback": MARKUP}
    await rolled(gateway, "one")
    await rolled(gateway, "two", index=1, reward=None, exception=fault, metadata={MARKUP: MARKUP})
    for path in ("/trajectories/one", "/trajectories/two", "/runs/run-1/steps/0/groups/g-1"):
        page = await gateway.http.get(path)
        assert page.status_code == 200, path
        assert "<script>alert" not in page.text and "&lt;script&gt;alert(1)" in page.text, path
        assert " style=" not in page.text and " onclick" not in page.text, path


async def test_a_group_shows_its_rollouts_side_by_side_and_the_judges_words(gateway: Gateway) -> None:
    await rolled(gateway, "one")
    await rolled(gateway, "two", index=1, reward=0.0)
    page = (await gateway.http.get("/runs/run-1/steps/0/groups/g-1")).text
    assert "R1</small> 1.00" in page and "R2</small> 0.00" in page
    assert "All rollouts begin with the same 4 messages" in page  # the user's, the call, its result, the answer
    assert "is short" in page and page.count('<article class="side"') == 2
    assert page.count(">+0.50</") == page.count(f">{MINUS}0.50</") == 2  # in the table, and side by side


async def test_a_group_without_spread_says_that_it_trains_nothing(gateway: Gateway) -> None:
    await rolled(gateway, "one", reward=0.5)
    await rolled(gateway, "two", index=1, reward=0.5)
    page = (await gateway.http.get("/runs/run-1/steps/0/groups/g-1")).text
    assert "All 2 scored rollouts have the reward 0.5" in page


async def test_a_prompt_that_leaves_the_call_before_it_is_shown_as_a_fork(gateway: Gateway) -> None:
    gateway.sampler.completions.append(ScriptedCompletion(prompt_ids=(1, 2, 3)))
    await gateway.chat({"x-offbook-trajectory": "one"})
    gateway.sampler.completions.append(ScriptedCompletion(prompt_ids=(1, 2, 3, 11, 99)))
    await gateway.chat({"x-offbook-trajectory": "one"})
    page = (await gateway.http.get("/trajectories/one")).text
    assert "not finished" in page
    assert re.search(r"Fork</strong> at token 4 of call 1", page)


@pytest.mark.parametrize("path", ["/trajectories/none", "/runs/run-1/steps/0/groups/none"])
async def test_an_unknown_name_is_a_page_that_says_so(gateway: Gateway, path: str) -> None:
    page = await gateway.http.get(path)
    assert page.status_code == 404 and "There is no" in page.text and "none" in page.text


# ---- pieces and turns, alone


def test_a_character_over_several_tokens_is_shown_as_bytes() -> None:
    pieces = TokenPieces(tiny.path())
    vocabulary = pieces._tokenizer.get_vocab()
    texts = ("âĤ", "¬") if "âĤ" in vocabulary else ("â", "Ĥ", "¬")  # the bytes of a euro sign
    ids = [vocabulary[text] for text in texts]
    shown = pieces.pieces([*ids, 2])
    assert "".join(piece.text for piece in shown[:-1]) == r"\xe2\x82\xac"
    assert shown[-1].special and pieces.text([*ids, 2]) == "€" + shown[-1].text
    assert pieces.pieces([999_999])[0].text == "[id 999999]"


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        TokenPieces(tmp_path)


def test_a_sub_agent_is_a_branch_and_a_later_call_goes_on_in_its_own_thread() -> None:
    def call(name: str, *contents: str) -> Call:
        roles = ["system", *(["user", "assistant"] * 5)]
        messages = tuple({"role": role, "content": text} for role, text in zip(roles, contents, strict=False))
        return Call.model_validate(
            {
                "id": name,
                "trajectory_id": "t",
                "model": "m",
                "step": 0,
                "status": "complete",
                "sampling": {},
                "messages": messages,
                "tools": None,
                "prompt_ids": (1,),
                "outputs": [
                    {
                        "index": 0,
                        "token_ids": (2,),
                        "logprobs": (-1.0,),
                        "message": {"role": "assistant", "content": f"answer of {name}"},
                        "finish_reason": "stop",
                    }
                ],
                "started_at": 0.0,
                "ended_at": 1.0,
            }
        )

    found = turns(
        [
            call("a", "be kind", "task"),
            call("sub", "search", "find it"),
            call("b", "be kind", "task", "answer of a", "go on"),
            call("c", "be kind", "task", "edited", "go on"),
        ]
    )
    assert [(turn.branch, turn.kept, turn.changed) for turn in found] == [(0, 0, 0), (1, 0, 0), (0, 3, 0), (0, 2, 3)]
    assert [message.text for message in found[2].context] == ["go on"]


async def test_pages_stay_quick_with_ten_thousand_sampled_tokens(gateway: Gateway) -> None:
    ids = tuple(range(100, 1100)) * 10
    gateway.sampler.completions.append(ScriptedCompletion((ScriptedChoice(("x",), (ids,), ((-0.5,) * 10_000,)),)))
    await gateway.chat({"x-offbook-trajectory": "long"})
    page: httpx.Response = await gateway.http.get("/trajectories/long")
    assert page.status_code == 200 and page.text.count('class="t s1') + page.text.count('class="t ctx') > 9_000
    assert len(page.content) < 2_000_000
