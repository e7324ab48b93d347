"""Trains the policy from random weights: Muon on the hidden matrices, AdamW on the rest, episodes that grow harder."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers and torch carry partial types.

import copy
import random
import re
import shutil
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from .basics import basic_episode
from .choices import choices
from .episodes import Episode, episode
from .marks import MARKS, UNMARKED, marks
from .muon import MULTIPLIES_BFLOAT16, Muon
from .parallel import Replicas
from .services import service_episode
from .tokenizer import CONTEXT, MARKUP, NUMBERS, complete_tokenizer, end_id, padding_id, render

POOL = 768
THREADS = 2
REPORT_STEPS = 20
PROBE_TOKENS = 2_000_000
MARKED_LAYER = 3
FORGETFUL = 0.4
WIDE_LEVELS = (1.0, 1.6)
WRITTEN = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)


@dataclass(frozen=True)
class Stage:
    """A part of the training: `wide` is the share of full episodes among basic ones, at its begin and at its end.

    `naming` is the share of basic episodes whose request names its tool. Rates are peaks; from the share `decay_from` of
    its tokens on, they fall to zero in a line. Losses of a prompt's tokens and of marks count by their weights.

    `services` is the share of service episodes among all; until `service_widening` of the stage they grow harder.
    `minutes`: the stage also ends after that time, and its progress is by whichever is further. `entered`: the share of
    the stage that was done before."""

    tokens: int
    wide: tuple[float, float]
    naming: float = 0.5
    widening: float = 1.0
    decay_from: float = 1.0
    batch_tokens: int = 4096
    muon_rate: float = 0.012
    adam_rate: float = 2e-3
    prompt_weight: float = 0.0
    mark_weight: float = 0.5
    services: float = 0.0
    service_widening: float = 0.0
    minutes: float | None = None
    pool: int = POOL
    warmup: int = 60
    entered: float = 0.0


SERVICES = Stage(
    tokens=20_000_000,
    wide=(0.95, 0.95),
    decay_from=0.45,
    muon_rate=0.0065,
    adam_rate=1.2e-3,
    mark_weight=0.2,
    services=0.68,
    service_widening=0.3,
    pool=256,
    warmup=20,
)
"""Goes on from finished weights: real tools beside the old kinds of episode."""
FALLING = Stage(tokens=7_000_000, wide=(0.85, 0.85), decay_from=0.0, muon_rate=0.007, adam_rate=1.5e-3, mark_weight=0.2)
STAGES = (
    Stage(tokens=2_000_000, wide=(0.0, 0.0), prompt_weight=0.05),
    Stage(tokens=12_000_000, wide=(0.2, 0.75), widening=0.6, decay_from=0.35, muon_rate=0.01),
    FALLING,
    replace(FALLING, tokens=6_000_000, decay_from=0.1, muon_rate=0.008),
    replace(FALLING, tokens=12_000_000, decay_from=0.2, muon_rate=0.009),
    replace(FALLING, tokens=8_000_000, wide=(0.9, 0.9), decay_from=0.05, muon_rate=0.008),
    replace(FALLING, tokens=11_000_000, wide=(0.95, 0.95), decay_from=0.05, muon_rate=0.009),
    replace(FALLING, tokens=8_000_000, wide=(0.95, 0.95), decay_from=0.05, muon_rate=0.008),
    replace(FALLING, tokens=7_000_000, wide=(0.95, 0.95), decay_from=0.05, muon_rate=0.009, mark_weight=0.5),
)
"""First to copy at all, from basic episodes; then ever wider; eight times the rates fall to zero."""


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """The policy with random weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id(tokenizer),
        pad_token_id=padding_id(tokenizer),
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=end_id(tokenizer),
        pad_token_id=padding_id(tokenizer),
    )
    return model


@dataclass(frozen=True)
class Example:
    """An episode's ids, which of them the assistant wrote (end marks included), and each one's mark or UNMARKED, [T];
    `open`: where it chose, the tokens that may stand there and their shares."""

    ids: list[int]
    written: list[bool]
    marks: list[int]
    open: dict[int, dict[int, float]]


@dataclass(frozen=True)
class Batch:
    """Ids, the assistant's share of them, and marks, all [B, T]; choices as (row, place, token, share), each [K]."""

    ids: torch.Tensor
    written: torch.Tensor
    marks: torch.Tensor
    open: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def encode(tokenizer: PreTrainedTokenizerBase, drawn: Episode, forgotten: int = 0) -> Example:
    """The episode as the policy is trained on it. The first `forgotten` turns of the assistant are context, without their
    thoughts, as most clients send them."""
    first = [index for index, each in enumerate(drawn.messages) if each["role"] == "assistant"][forgotten]
    before = [{key: each[key] for key in each if key != "reasoning_content"} for each in drawn.messages[:first]]
    text = render(tokenizer, before + drawn.messages[first:], drawn.tools)
    encoded = tokenizer(text, return_offsets_mapping=True)
    begins = [begin for begin, _ in encoded["offset_mapping"]]
    example = Example(encoded["input_ids"], [False] * len(begins), [UNMARKED] * len(begins), {})
    for found, turn in list(zip(WRITTEN.finditer(text), drawn.turns, strict=True))[forgotten:]:
        begin, end = places(begins, *found.span(1))
        example.written[begin:end] = [True] * (end - begin)
        example.open.update(
            {begin + place: shares for place, shares in choices(tokenizer, turn, example.ids[begin:end])}
        )
    for begin, end, mark in marks(drawn, text):
        for index in range(*places(begins, begin, end)):
            example.marks[index] = mark
    return example


def forget(rng: random.Random, turns: int) -> int:
    """How many turns of an episode are shown without their thoughts: never the last one."""
    return rng.randrange(turns) if rng.random() < FORGETFUL else 0


def places(begins: list[int], begin: int, end: int) -> tuple[int, int]:
    """The range of tokens that begin within these characters."""
    return bisect_left(begins, begin), bisect_left(begins, end)


def draw(rng: random.Random, stage: Stage, progress: float) -> Episode:
    """An episode as the stage shows it when this share of it is done."""
    if rng.random() < stage.services:
        level = progress / stage.service_widening if progress < stage.service_widening else rng.choice(WIDE_LEVELS)
        return service_episode(rng, level=level)
    narrow, full = stage.wide
    wide = narrow + (full - narrow) * min(1.0, progress / stage.widening)
    return episode(rng) if rng.random() < wide else basic_episode(rng, naming=stage.naming)


def batches(tokenizer: PreTrainedTokenizerBase, rng: random.Random, stage: Stage, progress: float) -> Iterator[Batch]:
    """Batches of episodes of like lengths, from one pool."""
    drawn = (draw(rng, stage, progress) for _ in range(stage.pool))
    size = stage.batch_tokens // THREADS
    encoded = sorted(
        (encode(tokenizer, one, forget(rng, len(one.turns))) for one in drawn), key=lambda example: len(example.ids)
    )
    grouped: list[list[Example]] = [[]]
    for example in encoded:
        if len(example.ids) * (len(grouped[-1]) + 1) > size:
            grouped.append([])
        grouped[-1].append(example)
    rng.shuffle(grouped)
    yield from (padded(group, padding_id(tokenizer)) for group in grouped)


def padded(group: list[Example], padding: int) -> Batch:
    """The examples as rows of one length."""
    longest = max(len(example.ids) for example in group)
    ids_B_T = torch.full((len(group), longest), padding)
    written_B_T = torch.zeros(len(group), longest)
    marks_B_T = torch.full((len(group), longest), UNMARKED)
    for row, example in enumerate(group):
        length = len(example.ids)
        ids_B_T[row, :length] = torch.tensor(example.ids)
        written_B_T[row, :length] = torch.tensor(example.written, dtype=torch.float)
        marks_B_T[row, :length] = torch.tensor(example.marks)
    chosen = [
        (row, place, token, share)
        for row, example in enumerate(group)
        for place, shares in example.open.items()
        for token, share in shares.items()
    ]
    rows, at, tokens, shares = zip(*chosen, strict=True) if chosen else ((), (), (), ())
    opened = (torch.tensor(rows).long(), torch.tensor(at).long(), torch.tensor(tokens).long(), torch.tensor(shares))
    return Batch(ids_B_T, written_B_T, marks_B_T, opened)


def loss_of(model: Qwen2ForCausalLM, probe: nn.Linear, stage: Stage, batch: Batch) -> torch.Tensor:
    """Cross-entropy of the assistant's tokens (others weigh `prompt_weight`), where it chose against the shares of the
    tokens that may stand there, and of the marks that `probe` reads."""
    ids, written, marks = batch.ids, batch.written, batch.marks
    pad = cast(int, model.config.pad_token_id)
    weights = (written + stage.prompt_weight * (1 - written))[:, 1:]
    weights = weights * (written[:, 1:] + (ids[:, 1:] != pad)).clamp(max=1)
    kept = weights > 0
    hidden = model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    logprobs = model.lm_head(hidden[-1][:, :-1][kept]).float().log_softmax(-1)
    losses = -logprobs.gather(-1, ids[:, 1:][kept][:, None])[:, 0]
    rows, at, tokens, shares = batch.open
    number = kept.flatten().cumsum(0).view_as(kept) - 1
    chosen = number[rows, at - 1]
    losses = losses.index_fill(0, chosen, 0.0).index_add(0, chosen, -shares * logprobs[chosen, tokens])
    seen = marks != UNMARKED
    noticed = functional.cross_entropy(probe(hidden[MARKED_LAYER][seen]).float(), marks[seen])
    return (losses * weights[kept]).sum() / weights.sum() + stage.mark_weight * noticed


class ProbedPolicy(nn.Module):
    """The policy and the probe of its marks."""

    model: Qwen2ForCausalLM
    probe: nn.Linear

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.probe = nn.Linear(model.config.hidden_size, len(MARKS))


def mixed_loss(stage: Stage, module: ProbedPolicy, batch: Batch) -> torch.Tensor:
    """`loss_of` with products of matrices in bfloat16, where the processor multiplies it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=MULTIPLIES_BFLOAT16):
        return loss_of(module.model, module.probe, stage, batch)


def grow(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Gives every number of a tool, and all other markup, its token: new rows of the embedding are mixtures of the rows
    of its kind."""
    torch.manual_seed(seed)
    missing = complete_tokenizer(tokenizer)
    if not missing:
        return
    ids = tokenizer.get_vocab()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    for kind in (NUMBERS, [text for text in MARKUP if text not in NUMBERS]):
        known = [text for text in kind if text not in missing]
        rows_N_D = embedding.weight.data[[ids[text] for text in known]].clone()
        middle_D = rows_N_D.mean(0)
        for text in [each for each in kind if each in missing]:
            shares_N = torch.randn(len(known))
            embedding.weight.data[ids[text]] = middle_D + (shares_N / shares_N.norm()) @ (rows_N_D - middle_D)


def make_optimizers(model: Qwen2ForCausalLM, probe: nn.Linear, stage: Stage) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, AdamW for embeddings, biases and norms."""
    matrices = [each for name, each in model.named_parameters() if each.ndim == 2 and "embed" not in name]
    others = [each for name, each in model.named_parameters() if each.ndim < 2 or "embed" in name]
    others += list(probe.parameters())
    muons = [Muon(matrices[at::THREADS], lr=stage.muon_rate, weight_decay=0.01) for at in range(THREADS)]
    adam = torch.optim.AdamW(others, lr=stage.adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer in (*muons, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [*muons, adam]


def rate(step: int, progress: float, stage: Stage) -> float:
    """The share of the peak rate: a short warm-up, a plateau, then a line down to zero."""
    falling = (1 - progress) / (1 - stage.decay_from) if stage.decay_from < 1 else 1.0
    return min(1.0, (step + 1) / stage.warmup, falling)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the policy in bfloat16 beside the folder, then moves it file by file over what is there."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    copy.deepcopy(model).bfloat16().save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    folder.mkdir(parents=True, exist_ok=True)
    for file in draft.iterdir():
        file.chmod(0o644)
        file.replace(folder / file.name)
    draft.rmdir()


def update(
    model: nn.Module, replicas: Replicas[ProbedPolicy], optimizers: list[torch.optim.Optimizer], share: float
) -> None:
    """One step at a share of the peak rates."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
    replicas.run([optimizer.step for optimizer in optimizers])
    for optimizer in optimizers:
        optimizer.zero_grad()


def train(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, stage: Stage, seed: int, glance: Callable[[], str]
) -> None:
    """Trains in place; prints the loss, and what `glance` says every half million tokens."""
    rng = random.Random(seed)
    torch.set_num_threads(1)
    trained = ProbedPolicy(model)
    replicas = Replicas(trained, THREADS)
    optimizers = make_optimizers(model, trained.probe, stage)
    start = time.monotonic()
    step = tokens = probed = 0
    recent: deque[float] = deque(maxlen=REPORT_STEPS)
    replicas.train(True)
    progress = stage.entered
    while progress < 1:
        for group in grouped(batches(tokenizer, rng, stage, progress)):
            spent = (time.monotonic() - start) / 60 / stage.minutes if stage.minutes else 0.0
            progress = stage.entered + (1 - stage.entered) * max(tokens / stage.tokens, spent)
            if progress >= 1:
                break
            recent.append(replicas.accumulate(partial(mixed_loss, stage), group))
            update(model, replicas, optimizers, rate(step, progress, stage))
            step += 1
            tokens += sum(batch.ids.numel() for batch in group)
            if step % REPORT_STEPS == 0:
                seconds = time.monotonic() - start
                report = f"step {step}  {tokens / 1e6:.2f}M tokens  {seconds / 60:.1f} min  {tokens / seconds:.0f}/s"
                print(f"{report}  loss {mean(recent):.3f}", flush=True)
            if tokens // PROBE_TOKENS != probed:
                probed = tokens // PROBE_TOKENS
                replicas.train(False)
                print(f"{tokens / 1e6:.2f}M tokens: {glance()}", flush=True)
                replicas.train(True)
    replicas.train(False)


def grouped(drawn: Iterator[Batch]) -> Iterator[list[Batch]]:
    """As many batches as there are threads, in turn."""
    while group := list(islice(drawn, THREADS)):
        yield group
