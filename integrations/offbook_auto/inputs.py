"""The inputs: asked for along the dimensions of the task, without near-duplicates, split without leakage."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.base.errors import ConfigError, LlmError
from offbook.base.terminal import echo
from offbook.base.types import Json
from offbook.llms.llm import Llm
from offbook.scenarios.identity import scenario_fields, scenario_id, scenario_text
from offbook.scenarios.loading import load_scenarios
from offbook_compare.contamination import plain_words

from .sources import Split
from .task import Task, write_whole
from .writer import PER_QUESTION, PURPOSE, BriefLine, WrittenInputs, inputs_question, named

SPLITS: tuple[Split, ...] = ("train", "held-out")
SHINGLE = 3
"""Number of consecutive words that are compared."""
NEARLY_EQUAL = 0.8
"""Similarity from which two texts count as equal."""
LEAKED = 0.5
"""Similarity from which a held-out input counts as known from training: stricter than within a split."""
DIFFICULTIES = 5
MAX_ROUNDS = 6
"""Rounds of questions in all."""
MAX_FRUITLESS = 2
"""Rounds in a row without a new input, after which no more are asked for."""
MAX_CHARACTERS = 20_000
MAX_COMBINATIONS = 2_000


@dataclass(frozen=True)
class TaskInput:
    """An input with its split."""

    id: str
    input: str
    split: Split


def brief(task: Task, wanted: Mapping[Split, int], seed: int) -> dict[Split, list[BriefLine]]:
    """The lines to write inputs for: values of each dimension equally often, difficulties 1 to 5 in turn.

    No combination of values is in both splits, unless there are too few. Each value is held out about equally often, so that
    training does not see it with some values of another dimension only.
    """
    rng = random.Random(seed)
    combinations = _combinations(task.dimensions, sum(wanted.values()), rng)
    share = round(len(combinations) * wanted["held-out"] / max(sum(wanted.values()), 1))
    held_out = set(_balanced(combinations, share))
    pools = {
        "held-out": [one for one in combinations if one in held_out],
        "train": [one for one in combinations if one not in held_out],
    }
    lines: dict[Split, list[BriefLine]] = {}
    for split in SPLITS:
        pool = pools[split] or combinations
        chosen = _balanced(pool, min(wanted[split], len(pool)))
        lines[split] = [
            BriefLine(number % DIFFICULTIES + 1, dict(zip(task.dimensions, chosen[number % len(chosen)], strict=True)))
            for number in range(wanted[split])
        ]
    return lines


def _combinations(dimensions: Mapping[str, Sequence[str]], wanted: int, rng: random.Random) -> list[tuple[str, ...]]:
    """Combinations of values in random order: all of them, or a sample where there are very many."""
    values, most = list(dimensions.values()), max(MAX_COMBINATIONS, 2 * wanted)
    if math.prod(map(len, values)) > most:
        return list(dict.fromkeys(tuple(map(rng.choice, values)) for _ in range(most)))
    combinations = list(itertools.product(*values))
    rng.shuffle(combinations)
    return combinations


def _balanced(combinations: Sequence[tuple[str, ...]], number: int) -> list[tuple[str, ...]]:
    """So many different combinations, in which each value occurs about equally often."""
    used: Counter[tuple[int, str]] = Counter()
    left = dict.fromkeys(combinations)
    for _ in range(number):
        best = min(left, key=lambda values: sum(used[place] ** 2 for place in enumerate(values)))
        used.update(enumerate(best))
        del left[best]
    return [one for one in combinations if one not in left]


class InputSet:
    """Inputs so far; a candidate that is like another is dropped and counted."""

    def __init__(self, wanted: Mapping[Split, int], examples: Sequence[str]) -> None:
        self.wanted = wanted
        self.accepted: list[dict[str, Json]] = []  # lines of scenarios.jsonl
        self.dropped: Counter[str] = Counter()
        self._examples = [shingles(text) for text in examples]
        self._known: list[tuple[Split, frozenset[str]]] = []

    def missing(self, split: Split) -> int:
        """How many inputs are still wanted."""
        return self.wanted[split] - sum(row["split"] == split for row in self.accepted)

    def add(self, text: str, split: Split, line: BriefLine) -> None:
        """Accept an input, or drop it: empty, too long, like an example or another input."""
        own = shingles(text)
        reason = self._fault(text, own, split)
        if reason:
            self.dropped[reason] += 1
            return
        name = f"{split}-{len(self.accepted) + 1:04}"
        row: dict[str, Json] = {"id": name, "input": text, "split": split, "difficulty": line.difficulty}
        self.accepted.append(row | ({"dimensions": dict(line.values)} if line.values else {}))
        self._known.append((split, own))

    def _fault(self, text: str, own: frozenset[str], split: Split) -> str:
        if not plain_words(text):
            return "without words"
        if len(text) > MAX_CHARACTERS:
            return f"longer than {MAX_CHARACTERS:,} characters"
        if split == "held-out" and any(jaccard(own, example) >= LEAKED for example in self._examples):
            return "held out, but like an example"
        for other, known in self._known:
            alike = jaccard(own, known)
            if alike >= NEARLY_EQUAL:
                return "nearly the same as another"
            if other != split and alike >= LEAKED:
                return "like one of the other split"
        return ""


async def write_inputs(llm: Llm, task: Task, wanted: Mapping[Split, int], seed: int, file: Path) -> None:
    """Ask for inputs until there are enough, and write scenarios.jsonl.

    What is asked depends on `seed`, the task and earlier answers alone, so that a run that was cut off finds its answers in
    the LLM's cache. Raises LlmError where the LLM gives too few: those that it gave are in `scenarios.partial.jsonl`.
    """
    inputs = InputSet(wanted, [example.input for example in task.examples])
    fruitless, failure, questions = 0, None, 0
    for round_number in range(MAX_ROUNDS):
        missing: dict[Split, int] = {split: inputs.missing(split) for split in SPLITS}
        if not any(missing.values()) or fruitless == MAX_FRUITLESS:
            break
        lines = brief(task, missing, seed + round_number)
        before = len(inputs.accepted)
        batches: list[tuple[Split, Sequence[BriefLine]]] = [
            (split, lines[split][start : start + PER_QUESTION])
            for split in reversed(SPLITS)
            for start in range(0, len(lines[split]), PER_QUESTION)
        ]
        known = [str(row["input"]) for row in inputs.accepted]
        failure = await _round(llm, task, batches, known, inputs, questions) or failure
        questions += len(batches)
        fruitless = 0 if len(inputs.accepted) > before else fruitless + 1
        echo(f"inputs: {len(inputs.accepted)} of {sum(wanted.values())}")
    if any(inputs.missing(split) for split in SPLITS):
        raise _too_few(llm, inputs, questions, failure, file)
    write_rows(inputs.accepted, file)


async def _round(
    llm: Llm,
    task: Task,
    batches: Sequence[tuple[Split, Sequence[BriefLine]]],
    known: Sequence[str],
    inputs: InputSet,
    asked: int,
) -> LlmError | None:
    """Ask all batches at once, and take the answers in their order. Returns the last failure of a question."""
    questions = [
        llm.ask(inputs_question(task, dict(enumerate(lines, 1)), known), WrittenInputs, PURPOSE, sample=asked + number)
        for number, (_, lines) in enumerate(batches)
    ]
    failure: LlmError | None = None
    for (split, lines), answer in zip(batches, await asyncio.gather(*questions, return_exceptions=True), strict=True):
        if isinstance(answer, LlmError) and not answer.lasting:
            failure = answer
            inputs.dropped[f"in a question without a usable answer ({answer.kind})"] += len(lines)
            continue
        if isinstance(answer, LlmError):
            raise named(answer, "scenarios.jsonl") from answer
        if isinstance(answer, BaseException):
            raise answer
        by_number = dict(enumerate(lines, 1))
        for item in answer.value.inputs:
            line = by_number.pop(item.number, None)
            if line is None:
                inputs.dropped["for no line of its question"] += 1
            else:
                inputs.add(item.input.strip(), split, line)
        if by_number:
            inputs.dropped["left out"] += len(by_number)
    return failure


def _too_few(llm: Llm, inputs: InputSet, questions: int, failure: LlmError | None, file: Path) -> LlmError:
    partial = file.with_name("scenarios.partial.jsonl")
    if not inputs.accepted and failure is not None:
        return named(failure, file.name)
    write_rows(inputs.accepted, partial)
    reasons = "; ".join(f"{count} {reason}" for reason, count in inputs.dropped.most_common())
    short = ", ".join(f"{inputs.missing(split)} {split}" for split in SPLITS if inputs.missing(split))
    return LlmError(
        f"{file.name} could not be written: {llm.options.model} gave {len(inputs.accepted)} of "
        f"{sum(inputs.wanted.values())} inputs in {questions} questions ({short} are missing; dropped: "
        f"{reasons or 'none'}). "
        f"What to do: ask for fewer (train_inputs=, held_out=), add values to `dimensions` in task.yaml, or name "
        "another LLM. "
        f"Those that it returned are in {partial}: rename it to {file.name} to continue with them",
        kind="invalid",
    )


def write_rows(rows: Sequence[Mapping[str, Json]], file: Path) -> None:
    """Write scenarios.jsonl."""
    write_whole(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_inputs(file: Path) -> list[TaskInput]:
    """Read scenarios.jsonl, whoever wrote it. Rows without `split` are for training. Raises ConfigError."""
    inputs: list[TaskInput] = []
    for number, scenario in enumerate(load_scenarios(file), 1):
        fields = scenario_fields(scenario)
        split = fields.get("split", "train")
        if split not in SPLITS:
            raise ConfigError(f"{file}: scenario {number}: split: train or held-out is needed, got {split!r:.100}")
        own: Split = "held-out" if split == "held-out" else "train"
        inputs.append(TaskInput(scenario_id(scenario), scenario_text(scenario), own))
    if not any(one.split == "train" for one in inputs):
        raise ConfigError(f"{file}: no scenario has `split: train`, so there is nothing to train on")
    return inputs


def shingles(text: str) -> frozenset[str]:
    """The runs of `SHINGLE` consecutive words; a shorter text is one run.

    >>> sorted(shingles("Where is box 4821?"))
    ['is box 4821', 'where is box']
    """
    words = plain_words(text).split()
    return frozenset(" ".join(words[start : start + SHINGLE]) for start in range(max(1, len(words) - SHINGLE + 1)))


def jaccard(own: frozenset[str], other: frozenset[str]) -> float:
    """The share of shingles that both have, from 0 to 1.

    >>> jaccard(shingles("please sort the red boxes"), shingles("please sort the red lids"))
    0.5
    """
    together = len(own | other)
    return len(own & other) / together if together else 0.0
