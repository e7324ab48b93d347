"""The teacher of distillation on policy: its logprobs of the tokens that the policy sampled, as they were recorded. It is an adapter
of this base, or a model on a vLLM server, which answers with `prompt_logprobs`."""

# pyright: reportUnknownMemberType=false
# torch and transformers are only partly typed

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from offbook.base.config import TeacherEndpoint
from offbook.base.errors import ConfigError, TrainError
from offbook.base.types import Json

from .. import checkpoint_files
from ..chat_template import PromptError
from ..protocol import UNKNOWN_LOGPROB, Sample
from ..sampling import TargetSettings
from .model.policy import Policy
from .targets.batch import TrainBatch
from .update.row_pass import Scores, TeacherScores


def load_teacher(policy: Policy, checkpoint: Path) -> None:
    """Give the policy the adapter of a checkpoint of the same base, of any shape. Raises EngineError, StoreError for a
    damaged or unreadable one."""
    lora = checkpoint_files.read(checkpoint).note.lora
    if policy.lora != lora:
        policy.reset_adapter(lora)
    policy.load_adapter(checkpoint)


def with_hint(batch: TrainBatch, hint: str, policy: Policy) -> TrainBatch:
    """The batch with `hint` as a system message before each prompt. The targets are the same. Raises ConfigError if the
    chat template cannot render such a message alone."""
    template = policy.chat_template
    try:
        text = template.render(({"role": "system", "content": hint},), None)
    except PromptError as error:
        raise ConfigError(
            f"distill.hint: this base's chat template has no place for a system message: {error}"
        ) from error
    ids = np.array(template.encode(text), np.int32)
    start = policy.tokenizer.bos_token_id

    def hinted(prompt: NDArray[np.int32]) -> NDArray[np.int32]:
        twice = len(prompt) > 0 and len(ids) > 0 and ids[0] == prompt[0] == start
        return np.concatenate([ids, prompt[1:] if twice else prompt])

    samples = tuple(replace(sample, prompt_ids=hinted(sample.prompt_ids)) for sample in batch.samples)
    return replace(batch, samples=samples)


def teacher_scores(scores: Scores, batch: TrainBatch, weight: float) -> TeacherScores:
    """The teacher's scores as the step takes them: NaN where its kept set excludes the token and for constrained calls."""
    usable = scores.kept & ~torch.from_numpy(batch.constrained)
    of_calls = np.array([sample.weight for sample in batch.samples], np.float64)
    return TeacherScores(
        torch.where(usable, scores.logprobs, torch.nan), weight * torch.from_numpy(of_calls[batch.call])
    )


KEY_VARIABLE = "OFFBOOK_TEACHER_KEY"
"""Environment variable of the server with the key of its teachers elsewhere."""
PARALLEL = 16
"""Requests at once; vLLM batches them."""
_SECONDS = httpx.Timeout(600.0, connect=20.0)
_PROBE = "A caf\u00e9 \u2014 \U0001f600 twice:  {'x': [1234, -5.6]}\n\n\tdef f(x):\n        return x\u4f60\u597d "
"""Text whose ids depend on the merges, the spaces and the digits of a tokenizer."""
_LARGEST = 0.01
"""Nats. A larger number is a logit, which vLLM answers with --logprobs-mode raw_logits."""


def endpoint_scores(
    endpoint: TeacherEndpoint, batch: TrainBatch, tokenizer: PreTrainedTokenizerBase, report: Callable[[int, int], None]
) -> Scores:
    """The teacher's scores of the batch's targets. `kept` is False for targets that were sampled at another temperature than 1
    or under a filter or grammar, none of which prompt_logprobs knows, and for those that the teacher gives no probability.

    Raises TrainError: the server does not answer, has another tokenizer, or no target was sampled plainly."""
    plain = _plain(batch.settings) & ~batch.constrained
    if not plain.any():
        raise TrainError(
            f"distill: the teacher {endpoint.model} at {endpoint.root} scores tokens that were sampled at temperature 1, without "
            f"top-p, top-k, min-p and a grammar. None of {len(batch)} was: sample so, or take a teacher on this server",
            reason="bad_job",
        )
    scores = Scores.empty(len(batch))
    taught = [s for s in batch.samples if plain[s.offset : s.offset + len(s.completion_ids)].any()]
    headers = {"authorization": f"Bearer {key}"} if (key := os.environ.get(KEY_VARIABLE)) else {}
    with (
        httpx.Client(base_url=endpoint.root, headers=headers, timeout=_SECONDS) as http,
        ThreadPoolExecutor(PARALLEL) as pool,
    ):
        server = _Server(http, endpoint)
        server.check(tokenizer)
        for done, (sample, values) in enumerate(zip(taught, pool.map(server.logprobs, taught), strict=True), 1):
            place = slice(sample.offset, sample.offset + len(sample.completion_ids))
            scores.logprobs[place] = torch.from_numpy(values)
            scores.kept[place] = torch.from_numpy(plain[place] & (values > UNKNOWN_LOGPROB))
            report(done, len(taught))
    return scores


def _plain(settings: TargetSettings) -> NDArray[np.bool_]:
    """Which targets were sampled from the whole distribution at temperature 1, [N]."""
    free = (settings.temperature == 1) & (settings.top_p == 1) & (settings.top_k == 0) & (settings.min_p == 0)
    return free if settings.allowed is None else free & (settings.allowed < 0)


class _Server:
    def __init__(self, http: httpx.Client, endpoint: TeacherEndpoint) -> None:
        self._http = http
        self._endpoint = endpoint

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare what every id of our vocabulary means there, and how a text becomes ids. Raises TrainError."""
        ids = list(range(len(tokenizer)))
        meant: Json = self._answer("/detokenize", {"tokens": cast(Json, ids)}).get("prompt")
        encoded: Json = self._answer("/tokenize", {"prompt": _PROBE, "add_special_tokens": False}).get("tokens")
        own: list[int] = tokenizer.encode(_PROBE, add_special_tokens=False)
        if meant == tokenizer.decode(ids) and encoded == own:
            return
        why = (
            f"it reads a text as {len(own)} ids, not {encoded!r:.80}" if encoded != own else "its ids mean other texts"
        )
        raise self._error(
            f"it has another tokenizer than this base ({type(tokenizer).__name__}, {len(ids):,} ids): {why}. A teacher has the "
            "vocabulary of the policy"
        )

    def logprobs(self, sample: Sample) -> NDArray[np.float64]:
        """Of the sample's completion, [C], nats; UNKNOWN_LOGPROB for a token without probability. Raises TrainError."""
        ids = [*sample.prompt_ids.tolist(), *sample.completion_ids.tolist()]
        body: dict[str, Json] = {"prompt": cast(Json, ids), "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
        answer = self._answer("/v1/completions", body)
        try:
            entries = cast(Sequence[dict[str, dict[str, Json]]], answer["choices"][0]["prompt_logprobs"])
            if len(entries) != len(ids):
                raise ValueError(f"{len(entries)} entries for {len(ids)} tokens")
            place = len(sample.prompt_ids)
            scored = [entry[str(id)]["logprob"] for entry, id in zip(entries[place:], ids[place:], strict=True)]
            values = np.array(scored, np.float64)
            if not (values <= _LARGEST).all():
                raise ValueError(f"{values.max()} is no logprob, start it with --logprobs-mode raw_logprobs")
        except (LookupError, TypeError, ValueError) as error:
            raise self._error(f"its prompt_logprobs are not vLLM's ({error!r:.200})") from error
        return values

    def _answer(self, path: str, body: dict[str, Json]) -> dict[str, Json]:
        try:
            answer = self._http.post(path, json={"model": self._endpoint.model, **body})
            if not answer.is_success:
                raise self._error(f"{path} was answered with status {answer.status_code}: {answer.text:.500}")
            content: Json = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise self._error(f"{path} was not answered: {error or type(error).__name__}") from error
        if not isinstance(content, dict):
            raise self._error(f"{path} was answered with {content!r:.100}, no object")
        return cast(dict[str, Json], content)

    def _error(self, what: str) -> TrainError:
        return TrainError(
            f"distill: the teacher {self._endpoint.model} at {self._endpoint.root}: {what}", reason="teacher"
        )
