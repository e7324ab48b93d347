"""Measures the policy on fresh episodes: `python -m understudy.tiny.evaluate`."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers and torch carry partial types.

import argparse
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2ForCausalLM

from . import path
from .basics import basic_episode
from .episodes import Episode, Kind, Turn, episode
from .services import service_episode
from .tokenizer import end_id, ids_of, padding_id, render, thinks

BATCH = 48
MOST_TOKENS = 192


@dataclass(frozen=True)
class Probe:
    """A prompt that ends where the assistant speaks, and what it may say there."""

    prompt: str
    turn: Turn
    first: bool


@dataclass(frozen=True)
class Exact:
    """Of `asked` probes, the shares with the right call (tool, arguments, values) or text: greedy, and sampled at
    temperature 1. `to_the_letter`: greedy, and the line before the call is right as well."""

    asked: int
    greedy: float
    sampled: float
    to_the_letter: float


@dataclass(frozen=True)
class Spread:
    """How a choice is spread: mass on right completions, and over these, evenness (1 is uniform) and the largest share."""

    mass: float
    evenness: float
    largest: float


def load(folder: Path | None = None) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerBase]:
    """The policy in float32, and its tokenizer."""
    folder = folder or path()
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def draw(count: int, seed: int, held_out: bool, kinds: Sequence[Kind]) -> list[Episode]:
    """Episodes of the given kinds in turn."""
    rng = random.Random(f"{seed} {held_out}")
    return [episode(rng, held_out=held_out, kind=kinds[index % len(kinds)]) for index in range(count)]


def probes(tokenizer: PreTrainedTokenizerBase, drawn: Episode) -> list[Probe]:
    """One probe for each message of the assistant."""
    turns = drawn.turns if thinks(tokenizer) else [unthinking(turn) for turn in drawn.turns]
    spoken = [index for index, message in enumerate(drawn.messages) if message["role"] == "assistant"]
    return [
        Probe(
            prompt=render(tokenizer, drawn.messages[:index], drawn.tools, prompt=True),
            turn=turn,
            first=drawn.messages[index - 1]["role"] == "user",
        )
        for index, turn in zip(spoken, turns, strict=True)
    ]


def unthinking(turn: Turn) -> Turn:
    """The turn as the bundled policy writes it."""
    return replace(turn, calls=tuple(re.sub("<think>(.*)</think>", r"\1\n", call) for call in turn.calls))


def complete(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: list[str], sampled: bool, seed: int = 0
) -> list[str]:
    """A completion for each prompt: greedy, or sampled at temperature 1."""
    torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    completions = [""] * len(prompts)
    for begin in range(0, len(order), BATCH):
        chosen = order[begin : begin + BATCH]
        batch = tokenizer([prompts[index] for index in chosen], return_tensors="pt", padding=True)
        ids = model.generate(  # pyright: ignore[reportAttributeAccessIssue]  # the stub's protocol is too narrow
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=MOST_TOKENS,
            do_sample=sampled,
            top_k=0 if sampled else None,
            temperature=1.0 if sampled else None,
        )
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in zip(chosen, texts, strict=True):
            completions[index] = text
    return completions


def matched(completions: list[str], asked: list[Probe]) -> float:
    """The share of completions that are right to the letter."""
    return mean(text in one.turn.calls + one.turn.texts for text, one in zip(completions, asked, strict=True))


def call_of(completion: str) -> str:
    """The call of a completion, without the line before it; all of a completion that calls nothing."""
    _, mark, call = completion.partition("<tool_call>")
    return mark + call if mark else completion


def called(completions: list[str], asked: list[Probe]) -> float:
    """The share of completions with a right call, or a right text."""
    return mean(
        call_of(text) in {call_of(right) for right in one.turn.calls + one.turn.texts}
        for text, one in zip(completions, asked, strict=True)
    )


def tool_of(completion: str) -> str:
    """A completion up to the arguments of its call: the line and the name of the tool it takes."""
    return completion.split(', "arguments"')[0]


def glance(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int = 48) -> str:
    """How far training is: first calls of held-out episodes, their tool right and all of it right."""
    rng = random.Random(0)
    basic = [basic_episode(rng, held_out=True) for _ in range(count)]
    simple = [basic_episode(rng, held_out=True, naming=1.0) for _ in range(count)]
    report: list[str] = []
    for name, drawn in (("basic", basic), ("simply named", simple), ("named", draw(count, 0, True, ("named",)))):
        asked = [probes(tokenizer, one)[0] for one in drawn]
        for sampled in (False, True):
            texts = complete(model, tokenizer, [each.prompt for each in asked], sampled)
            tools = mean(
                tool_of(text) in {tool_of(call) for call in each.turn.calls}
                for text, each in zip(texts, asked, strict=True)
            )
            report.append(
                f"{name} {'sampled' if sampled else 'greedy'} tool {tools:.0%} all {matched(texts, asked):.0%}"
            )
    spreads, going_on = measure_choice(model, tokenizer, count, 0, held_out=True)
    report.append(
        f"open fitting {mean(each.mass for each in spreads):.0%} even {mean(each.evenness for each in spreads):.2f}"
    )
    return ", ".join([*report, f"goes on {mean(going_on):.0%}"])


def glance_at_services(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int = 16) -> str:
    """How far training on services is: greedy first calls of held-out episodes, beside the old kinds."""
    rng = random.Random(0)
    easy = [service_episode(rng, held_out=True, level=0.0) for _ in range(count)]
    wide = [service_episode(rng, held_out=True) for _ in range(2 * count)]
    report: list[str] = []
    for name, drawn in (("easy", easy), ("services", wide), ("named", draw(2 * count, 0, True, ("named",)))):
        asked = [probes(tokenizer, one)[0] for one in drawn]
        texts = complete(model, tokenizer, [each.prompt for each in asked], sampled=False)
        tools = mean(
            tool_of(text) in {tool_of(call) for call in each.turn.calls}
            for text, each in zip(texts, asked, strict=True)
        )
        report.append(f"{name}: tool {tools:.0%}, call {called(texts, asked):.0%}")
    return "; ".join(report)


@torch.inference_mode()
def probabilities(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, completions: Sequence[str]
) -> list[float]:
    """The probability of each completion, its end mark included."""
    head = ids_of(tokenizer, prompt)
    tails = [[*ids_of(tokenizer, text), end_id(tokenizer)] for text in completions]
    longest = max(len(tail) for tail in tails)
    ids = torch.tensor([head + tail + [padding_id(tokenizer)] * (longest - len(tail)) for tail in tails])
    logprobs = model(input_ids=ids, use_cache=False).logits[:, len(head) - 1 : -1].log_softmax(-1)
    picked = logprobs.gather(-1, ids[:, len(head) :, None])[..., 0]
    return [math.exp(row[: len(tail)].sum().item()) for row, tail in zip(picked, tails, strict=True)]


def spread(shares: Sequence[float]) -> Spread:
    """The spread over probabilities of at least two completions."""
    mass = sum(shares)
    parts = [share / mass for share in shares]
    entropy = -sum(part * math.log(part) for part in parts if part > 0)
    return Spread(mass, entropy / math.log(len(parts)), max(parts))


def single(turn: Turn) -> bool:
    """Whether one completion alone is right."""
    return len(turn.calls) + len(turn.texts) == 1


def measure_exact(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int, seed: int, held_out: bool
) -> dict[str, Exact]:
    """For each skill, how much is answered exactly."""
    calls = [each for one in draw(count, seed, held_out, ("named", "chain")) for each in probes(tokenizer, one)]
    talked = [each for one in draw(count // 2, seed, held_out, ("plain",)) for each in probes(tokenizer, one)]
    skills = {
        "tool calls": [each for each in calls if each.first and single(each.turn) and each.turn.calls],
        "second calls": [each for each in calls if not each.first and single(each.turn) and each.turn.calls],
        "final answers": [each for each in calls if single(each.turn) and each.turn.texts],
        "plain replies": talked,
    }
    measured: dict[str, Exact] = {}
    for skill, asked in skills.items():
        prompts = [each.prompt for each in asked]
        greedy, sampled = (complete(model, tokenizer, prompts, mode, seed) for mode in (False, True))
        measured[skill] = Exact(len(asked), called(greedy, asked), called(sampled, asked), matched(greedy, asked))
    return measured


def measure_choice(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int, seed: int, held_out: bool
) -> tuple[list[Spread], list[float]]:
    """Spreads where several tools fit a request, and the share that goes on where a result leads to another tool."""
    spreads: list[Spread] = []
    going_on: list[float] = []
    for one in draw(count, seed, held_out, ("open",)):
        for each in probes(tokenizer, one):
            turn = each.turn
            if each.first and len(turn.calls) > 1:
                spreads.append(spread(probabilities(model, tokenizer, each.prompt, turn.calls)))
            elif turn.calls and turn.texts:
                shares = probabilities(model, tokenizer, each.prompt, turn.calls + turn.texts)
                going_on.append(sum(shares[: len(turn.calls)]) / sum(shares))
    return spreads, going_on


def main() -> None:
    """Prints all measures for words and wordings of the training kind, and for held-out ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=path())
    parser.add_argument("--count", type=int, default=400, help="episodes for each measure")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    model, tokenizer = load(options.folder)
    for held_out in (False, True):
        print("held-out words and wordings" if held_out else "new episodes of the training kind")
        exact = measure_exact(model, tokenizer, options.count, options.seed, held_out)
        for skill, each in exact.items():
            print(
                f"  {skill:<14} {each.asked:4} probes   exact: greedy {each.greedy:6.1%}   sampled {each.sampled:6.1%}   "
                f"with the line before: {each.to_the_letter:6.1%}"
            )
        spreads, going_on = measure_choice(model, tokenizer, options.count, options.seed, held_out)
        print(
            f"  open choices   {len(spreads):4} probes   fitting {mean(each.mass for each in spreads):.1%}, "
            f"evenness {mean(each.evenness for each in spreads):.2f}, "
            f"largest share {mean(each.largest for each in spreads):.2f}"
        )
        spread_out = mean(0.15 < share < 0.85 for share in going_on)
        print(
            f"  going on       {len(going_on):4} probes   mean {mean(going_on):.2f}, "
            f"between 0.15 and 0.85 in {spread_out:.0%}"
        )


if __name__ == "__main__":
    main()
