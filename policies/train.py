"""Trains a policy: Muon on the hidden matrices, AdamW on all other parameters, on episodes that become harder."""

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
from .episodes import Episode, episode
from .muon import MULTIPLIES_BFLOAT16, Muon
from .parallel import Replicas
from .probe_labels import LABELS, UNLABELLED, probe_labels
from .services import service_episode
from .soft_targets import soft_targets
from .tokenizer import CONTEXT, MARKUP, NUMBERS, complete_tokenizer, end_id, padding_id, render

POOL = 768  # number of episodes that are sorted by length into batches at a time
THREADS = 2
REPORT_STEPS = 20  # optimizer steps between two lines on the loss
PROBE_TOKENS = 2_000_000  # tokens between two progress reports
PROBED_LAYER = 3  # the hidden layer that the linear probe reads
FORGET_SHARE = 0.4  # share of episodes whose first turns are context without thoughts, as most clients send them
WIDE_LEVELS = (1.0, 1.6)  # levels of service episodes after the widening, equally likely
WRITTEN = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)


@dataclass(frozen=True)
class Stage:
    """A part of the training. Each share is between 0 and 1, and progress is the share of the stage that is done.

    `tokens` and `minutes` end the stage, whichever comes first. `entered` is the progress of an interrupted run.

    Episodes: a share `services` are service episodes, which widen until the progress `service_widening`. Among the
    others, the share of full episodes goes from `wide[0]` to `wide[1]` until the progress `widening`; the rest are
    basic ones. A share `naming` of the basic requests names its tool.

    Optimization: `muon_rate` and `adam_rate` are peak learning rates. They rise over `warmup` steps, and fall linearly
    to 0 from the progress `decay_from` on. `batch_tokens` are the tokens of one step over all threads. Prompt tokens
    count in the loss with `prompt_weight`, the probe's loss with `probe_weight`."""

    tokens: int
    wide: tuple[float, float]
    naming: float = 0.5
    widening: float = 1.0
    decay_from: float = 1.0
    batch_tokens: int = 4096
    muon_rate: float = 0.012
    adam_rate: float = 2e-3
    prompt_weight: float = 0.0
    probe_weight: float = 0.5
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
    probe_weight=0.2,
    services=0.8,
    service_widening=0.3,
    pool=256,
    warmup=20,
)
"""Further training of finished weights: service episodes, with a share of the other kinds."""
FALLING = Stage(
    tokens=7_000_000, wide=(0.85, 0.85), decay_from=0.0, muon_rate=0.007, adam_rate=1.5e-3, probe_weight=0.2
)
STAGES = (
    Stage(tokens=2_000_000, wide=(0.0, 0.0), prompt_weight=0.05),
    Stage(tokens=12_000_000, wide=(0.2, 0.75), widening=0.6, decay_from=0.35, muon_rate=0.01),
    FALLING,
    replace(FALLING, tokens=6_000_000, decay_from=0.1, muon_rate=0.008),
    replace(FALLING, tokens=12_000_000, decay_from=0.2, muon_rate=0.009),
    replace(FALLING, tokens=8_000_000, wide=(0.9, 0.9), decay_from=0.05, muon_rate=0.008),
    replace(FALLING, tokens=11_000_000, wide=(0.95, 0.95), decay_from=0.05, muon_rate=0.009),
    replace(FALLING, tokens=8_000_000, wide=(0.95, 0.95), decay_from=0.05, muon_rate=0.008),
    replace(FALLING, tokens=7_000_000, wide=(0.95, 0.95), decay_from=0.05, muon_rate=0.009, probe_weight=0.5),
)
"""Training from random weights: first copying, on basic episodes, then full episodes. The rates fall to 0 in eight of
the nine stages."""


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
    """An encoded episode of T tokens.

    `ids`, `written` (whether the assistant wrote the token, end marks included) and `labels` (of the probe, or
    UNLABELLED) have length T. `soft_targets`: place -> {token id: share}, where several tokens are right."""

    ids: list[int]
    written: list[bool]
    labels: list[int]
    soft_targets: dict[int, dict[int, float]]


@dataclass(frozen=True)
class Batch:
    """Examples as padded rows. `ids`, `written` and `labels` are [B, T]. `soft_targets` are K entries as (row, place,
    token, share), each [K]."""

    ids: torch.Tensor
    written: torch.Tensor
    labels: torch.Tensor
    soft_targets: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def encode(tokenizer: PreTrainedTokenizerBase, drawn: Episode, forgotten: int = 0) -> Example:
    """Encode an episode for training. The first `forgotten` turns of the assistant are context, and their thoughts are
    left out."""
    first = [index for index, message in enumerate(drawn.messages) if message["role"] == "assistant"][forgotten]
    before = [
        {key: message[key] for key in message if key != "reasoning_content"} for message in drawn.messages[:first]
    ]
    text = render(tokenizer, before + drawn.messages[first:], drawn.tools)
    encoded = tokenizer(text, return_offsets_mapping=True)
    begins = [begin for begin, _ in encoded["offset_mapping"]]
    example = Example(encoded["input_ids"], [False] * len(begins), [UNLABELLED] * len(begins), {})
    for match, turn in list(zip(WRITTEN.finditer(text), drawn.turns, strict=True))[forgotten:]:
        begin, end = token_range(begins, *match.span(1))
        example.written[begin:end] = [True] * (end - begin)
        targets = soft_targets(tokenizer, turn, example.ids[begin:end])
        example.soft_targets.update({begin + place: shares for place, shares in targets})
    for begin, end, label in probe_labels(drawn, text):
        for index in range(*token_range(begins, begin, end)):
            example.labels[index] = label
    return example


def forget(rng: random.Random, turns: int) -> int:
    """Draw how many of an episode's turns are shown without their thoughts; never the last one."""
    return rng.randrange(turns) if rng.random() < FORGET_SHARE else 0


def token_range(begins: list[int], begin: int, end: int) -> tuple[int, int]:
    """The range of tokens that start within these characters, by the sorted offsets at which tokens start.

    >>> token_range([0, 3, 5, 9], 3, 9)
    (1, 3)
    """
    return bisect_left(begins, begin), bisect_left(begins, end)


def draw(rng: random.Random, stage: Stage, progress: float) -> Episode:
    """Draw an episode as the stage shows it at this progress."""
    if rng.random() < stage.services:
        level = progress / stage.service_widening if progress < stage.service_widening else rng.choice(WIDE_LEVELS)
        return service_episode(rng, level=level)
    narrow, full = stage.wide
    wide = narrow + (full - narrow) * min(1.0, progress / stage.widening)
    return episode(rng) if rng.random() < wide else basic_episode(rng, naming=stage.naming)


def batches(tokenizer: PreTrainedTokenizerBase, rng: random.Random, stage: Stage, progress: float) -> Iterator[Batch]:
    """Yield batches of episodes of similar lengths, from one pool, in random order."""
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
    """The examples as rows of equal length."""
    longest = max(len(example.ids) for example in group)
    ids_B_T = torch.full((len(group), longest), padding)
    written_B_T = torch.zeros(len(group), longest)
    labels_B_T = torch.full((len(group), longest), UNLABELLED)
    for row, example in enumerate(group):
        length = len(example.ids)
        ids_B_T[row, :length] = torch.tensor(example.ids)
        written_B_T[row, :length] = torch.tensor(example.written, dtype=torch.float)
        labels_B_T[row, :length] = torch.tensor(example.labels)
    chosen = [
        (row, place, token, share)
        for row, example in enumerate(group)
        for place, shares in example.soft_targets.items()
        for token, share in shares.items()
    ]
    rows, places, tokens, shares = zip(*chosen, strict=True) if chosen else ((), (), (), ())
    targets = (
        torch.tensor(rows).long(),
        torch.tensor(places).long(),
        torch.tensor(tokens).long(),
        torch.tensor(shares),
    )
    return Batch(ids_B_T, written_B_T, labels_B_T, targets)


def loss_of(model: Qwen2ForCausalLM, probe: nn.Linear, stage: Stage, batch: Batch) -> torch.Tensor:
    """The training loss of a batch, a scalar.

    Cross-entropy of each token, weighted by 1 where the assistant wrote it and by `prompt_weight` elsewhere. Where
    several tokens are right, the target is their distribution. To this comes `probe_weight` times the cross-entropy of
    the probe's labels."""
    ids, written, labels = batch.ids, batch.written, batch.labels
    pad = cast(int, model.config.pad_token_id)
    weights = (written + stage.prompt_weight * (1 - written))[:, 1:]
    weights = weights * (written[:, 1:] + (ids[:, 1:] != pad)).clamp(max=1)
    kept = weights > 0
    hidden = model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    logprobs = model.lm_head(hidden[-1][:, :-1][kept]).float().log_softmax(-1)
    losses = -logprobs.gather(-1, ids[:, 1:][kept][:, None])[:, 0]
    rows, places, tokens, shares = batch.soft_targets
    number = kept.flatten().cumsum(0).view_as(kept) - 1
    chosen = number[rows, places - 1]
    losses = losses.index_fill(0, chosen, 0.0).index_add(0, chosen, -shares * logprobs[chosen, tokens])
    labelled = labels != UNLABELLED
    probe_loss = functional.cross_entropy(probe(hidden[PROBED_LAYER][labelled]).float(), labels[labelled])
    return (losses * weights[kept]).sum() / weights.sum() + stage.probe_weight * probe_loss


class ProbedPolicy(nn.Module):
    """The policy with the linear probe of its labels."""

    model: Qwen2ForCausalLM
    probe: nn.Linear

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.probe = nn.Linear(model.config.hidden_size, len(LABELS))


def mixed_loss(stage: Stage, module: ProbedPolicy, batch: Batch) -> torch.Tensor:
    """`loss_of` with matrix products in bfloat16, where the CPU multiplies it in hardware."""
    with torch.autocast("cpu", torch.bfloat16, enabled=MULTIPLIES_BFLOAT16):
        return loss_of(module.model, module.probe, stage, batch)


def grow(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """Add a token for every markup text that the tokenizer lacks. A new embedding row is a random mixture of the known
    rows of its kind (numbers, other markup)."""
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
        for text in [token for token in kind if token in missing]:
            shares_N = torch.randn(len(known))
            embedding.weight.data[ids[text]] = middle_D + (shares_N / shares_N.norm()) @ (rows_N_D - middle_D)


def make_optimizers(model: Qwen2ForCausalLM, probe: nn.Linear, stage: Stage) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, one per thread; AdamW for embeddings, biases, norms and the
    probe."""
    matrices = [
        parameter for name, parameter in model.named_parameters() if parameter.ndim == 2 and "embed" not in name
    ]
    others = [parameter for name, parameter in model.named_parameters() if parameter.ndim < 2 or "embed" in name]
    others += list(probe.parameters())
    muons = [Muon(matrices[first::THREADS], lr=stage.muon_rate, weight_decay=0.01) for first in range(THREADS)]
    adam = torch.optim.AdamW(others, lr=stage.adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer in (*muons, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [*muons, adam]


def rate(step: int, progress: float, stage: Stage) -> float:
    """The learning rate as a share of its peak: a linear warm-up, a plateau, then a linear decay to 0."""
    falling = (1 - progress) / (1 - stage.decay_from) if stage.decay_from < 1 else 1.0
    return min(1.0, (step + 1) / stage.warmup, falling)


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the policy in bfloat16 to a draft folder beside `folder`, then move its files over those in `folder`."""
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
    """One optimizer step at a share of the peak learning rates, with gradients clipped to norm 1."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
    replicas.run([optimizer.step for optimizer in optimizers])
    for optimizer in optimizers:
        optimizer.zero_grad()


def train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    stage: Stage,
    seed: int,
    progress_report: Callable[[], str],
) -> None:
    """Train in place until the stage ends. Prints the loss every REPORT_STEPS steps, and `progress_report()` every
    PROBE_TOKENS tokens."""
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
                print(f"{tokens / 1e6:.2f}M tokens: {progress_report()}", flush=True)
                replicas.train(True)
    replicas.train(False)


def grouped(drawn: Iterator[Batch]) -> Iterator[list[Batch]]:
    """Batches in groups of THREADS; the last group may be smaller."""
    while group := list(islice(drawn, THREADS)):
        yield group
