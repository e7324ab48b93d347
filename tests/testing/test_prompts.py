"""The kit's samplers complete prompts as vLLM does."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from offbook.testing import Action, scripted_server


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_completed_by_the_policy_and_recorded(tmp_path: Path, stream: bool) -> None:
    with scripted_server(lambda body: Action(f"after {body['messages'][0]['content']}"), tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/t/t1/v1", api_key="any")
        prompts: list[str | list[int]] = ["one two", [3, 5, 7]]
        for prompt in prompts:
            fields = {"model": "default", "prompt": prompt, "logprobs": 0}
            if stream:
                chunks = [chunk for chunk in client.completions.create(**fields, stream=True) if chunk.choices]
                text = "".join(chunk.choices[0].text for chunk in chunks)
            else:
                text = client.completions.create(**fields).choices[0].text
            assert text == ("after one two" if prompt == "one two" else "after 3 token ids")
        words, ids = server.calls("t1")
        assert len(words.prompt_ids) == 2 and ids.prompt_ids == (3, 5, 7)
        assert [len(call.outputs[0].token_ids) for call in (words, ids)] == [4, 5]
