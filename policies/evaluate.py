"""Measures a policy on fresh episodes: `python -m policies.evaluate`."""

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

from offbook.tiny import path

from .basics import basic_episode
from .episodes import Episode, Kind, Turn, episode
from .services import service_episode
from .tokenizer import end_id, ids_of, padding_id, render, thinks

BATCH = 48
GREEDY_BATCH_CHARS = 16_000
"""Long prompts are completed in smaller greedy batches, which are faster. Sampled batches keep their size: it decides the
draws of a seed."""
MAX_TOKENS = 192


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt that ends where the assistant's turn begins, with the right completions of that turn. `first`: the turn
    follows the user's message."""

    text: str
    turn: Turn
    first: bool


@dataclass(frozen=True)
class Exact:
    """Shares of right completions among `count` prompts, greedy and sampled at temperature 1. A call is right when its
    tool, arguments and values are; a text, when it is equal. `to_the_letter`: greedy, and the thought before the call
    is equal as well."""

    count: int
    greedy: float
    sampled: float
    to_the_letter: float


@dataclass(frozen=True)
class Spread:
    """How probability is spread over the right completions: their total `mass`, the entropy of their normalised shares
    over that of a uniform choice (`evenness`, 1 is uniform), and the largest normalised share."""

    mass: float
    evenness: float
    largest: float


def load(folder: Path | None = None) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerBase]:
    """The policy in float32 in evaluation mode, and its tokenizer; `tiny` by default."""
    folder = folder or path()
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def draw(count: int, seed: int, held_out: bool, kinds: Sequence[Kind]) -> list[Episode]:
    """Episodes of these kinds in turn. The same arguments give the same episodes."""
    rng = random.Random(f"{seed} {held_out}")
    return [episode(rng, held_out=held_out, kind=kinds[index % len(kinds)]) for index in range(count)]


def evaluation_prompts(tokenizer: PreTrainedTokenizerBase, drawn: Episode) -> list[EvaluationPrompt]:
    """One prompt per message of the assistant."""
    turns = drawn.turns if thinks(tokenizer) else [without_think_tags(turn) for turn in drawn.turns]
    positions = [index for index, message in enumerate(drawn.messages) if message["role"] == "assistant"]
    return [
        EvaluationPrompt(
            text=render(tokenizer, drawn.messages[:index], drawn.tools, prompt=True),
            turn=turn,
            first=drawn.messages[index - 1]["role"] == "user",
        )
        for index, turn in zip(positions, turns, strict=True)
    ]


def without_think_tags(turn: Turn) -> Turn:
    """The turn as `tiny` writes it: the thought is text before the call."""
    return replace(turn, calls=tuple(re.sub("<think>(.*)</think>", r"\1\n", call) for call in turn.calls))


def complete(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    sampled: bool,
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
) -> list[str]:
    """A completion of at most `max_tokens` tokens per prompt, in their order: greedy, or sampled at temperature 1 from
    `seed`."""
    torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    completions = [""] * len(prompts)
    while order:
        size = BATCH if sampled else min(BATCH, max(8, GREEDY_BATCH_CHARS // len(prompts[order[0]])))
        chosen, order = order[:size], order[size:]
        batch = tokenizer([prompts[index] for index in chosen], return_tensors="pt", padding=True)
        ids = model.generate(  # pyright: ignore[reportAttributeAccessIssue]  # the stub's protocol is too narrow
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_tokens,
            do_sample=sampled,
            top_k=0 if sampled else None,
            temperature=1.0 if sampled else None,
            cache_implementation="static",  # a growing cache is copied for every token: most of the time went into page faults
            disable_compile=True,
        )
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in zip(chosen, texts, strict=True):
            completions[index] = text
    return completions


def matched(completions: Sequence[str], prompts: Sequence[EvaluationPrompt]) -> float:
    """The share of completions that equal a right one."""
    return mean(
        text in prompt.turn.calls + prompt.turn.texts for text, prompt in zip(completions, prompts, strict=True)
    )


def call_of(completion: str) -> str:
    """The call of a completion, without the thought; the whole completion when it has no call.

    >>> call_of("order<1>\\n<tool_call>{}</tool_call>"), call_of("Hello.")
    ('<tool_call>{}</tool_call>', 'Hello.')
    """
    _, mark, call = completion.partition("<tool_call>")
    return mark + call if mark else completion


def called(completions: Sequence[str], prompts: Sequence[EvaluationPrompt]) -> float:
    """The share of completions whose call, or text, is right. Thoughts are not compared."""
    return mean(
        call_of(text) in {call_of(right) for right in prompt.turn.calls + prompt.turn.texts}
        for text, prompt in zip(completions, prompts, strict=True)
    )


def tool_of(completion: str) -> str:
    """A completion up to the arguments of its call: the thought and the tool's name."""
    return completion.split(', "arguments"')[0]


def progress_report(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int = 48) -> str:
    """One line on first calls of `count` held-out episodes of each kind: the share with the right tool, and with the
    right completion."""
    rng = random.Random(0)
    basic = [basic_episode(rng, held_out=True) for _ in range(count)]
    simple = [basic_episode(rng, held_out=True, naming=1.0) for _ in range(count)]
    report: list[str] = []
    for name, drawn in (("basic", basic), ("simply named", simple), ("named", draw(count, 0, True, ("named",)))):
        prompts = [evaluation_prompts(tokenizer, one)[0] for one in drawn]
        for sampled in (False, True):
            texts = complete(model, tokenizer, [prompt.text for prompt in prompts], sampled)
            tools = mean(
                tool_of(text) in {tool_of(call) for call in prompt.turn.calls}
                for text, prompt in zip(texts, prompts, strict=True)
            )
            report.append(
                f"{name} {'sampled' if sampled else 'greedy'} tool {tools:.0%} all {matched(texts, prompts):.0%}"
            )
    spreads, going_on = measure_choice(model, tokenizer, count, 0, held_out=True)
    report.append(
        f"open fitting {mean(spread.mass for spread in spreads):.0%} even {mean(spread.evenness for spread in spreads):.2f}"
    )
    return ", ".join([*report, f"goes on {mean(going_on):.0%}"])


def service_progress(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int = 16) -> str:
    """One line on greedy first calls of held-out episodes: narrow services, full services, and requests of `episode`
    that name a tool."""
    rng = random.Random(0)
    easy = [service_episode(rng, held_out=True, level=0.0) for _ in range(count)]
    wide = [service_episode(rng, held_out=True) for _ in range(2 * count)]
    report: list[str] = []
    for name, drawn in (("easy", easy), ("services", wide), ("named", draw(2 * count, 0, True, ("named",)))):
        prompts = [evaluation_prompts(tokenizer, one)[0] for one in drawn]
        texts = complete(model, tokenizer, [prompt.text for prompt in prompts], sampled=False)
        tools = mean(
            tool_of(text) in {tool_of(call) for call in prompt.turn.calls}
            for text, prompt in zip(texts, prompts, strict=True)
        )
        report.append(f"{name}: tool {tools:.0%}, call {called(texts, prompts):.0%}")
    return "; ".join(report)


@torch.inference_mode()
def probabilities(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, completions: Sequence[str]
) -> list[float]:
    """The probability of each completion after the prompt, its end mark included."""
    head = ids_of(tokenizer, prompt)
    tails = [[*ids_of(tokenizer, text), end_id(tokenizer)] for text in completions]
    longest = max(len(tail) for tail in tails)
    ids = torch.tensor([head + tail + [padding_id(tokenizer)] * (longest - len(tail)) for tail in tails])
    logprobs = model(input_ids=ids, use_cache=False).logits[:, len(head) - 1 : -1].log_softmax(-1)
    picked = logprobs.gather(-1, ids[:, len(head) :, None])[..., 0]
    return [math.exp(row[: len(tail)].sum().item()) for row, tail in zip(picked, tails, strict=True)]


def spread(shares: Sequence[float]) -> Spread:
    """The spread of at least two probabilities, of which one is above 0.

    >>> spread([0.4, 0.4])
    Spread(mass=0.8, evenness=1.0, largest=0.5)
    """
    mass = sum(shares)
    parts = [share / mass for share in shares]
    entropy = -sum(part * math.log(part) for part in parts if part > 0)
    return Spread(mass, entropy / math.log(len(parts)), max(parts))


def single(turn: Turn) -> bool:
    """Whether the turn has exactly one right completion."""
    return len(turn.calls) + len(turn.texts) == 1


def measure_exact(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int, seed: int, held_out: bool
) -> dict[str, Exact]:
    """Name of a skill -> its scores, on `count` episodes that name tools and `count // 2` plain requests."""
    tasks = draw(count, seed, held_out, ("named", "chain"))
    calls = [prompt for one in tasks for prompt in evaluation_prompts(tokenizer, one)]
    chats = draw(count // 2, seed, held_out, ("plain",))
    replies = [prompt for one in chats for prompt in evaluation_prompts(tokenizer, one)]
    skills = {
        "tool calls": [prompt for prompt in calls if prompt.first and single(prompt.turn) and prompt.turn.calls],
        "second calls": [prompt for prompt in calls if not prompt.first and single(prompt.turn) and prompt.turn.calls],
        "final answers": [prompt for prompt in calls if single(prompt.turn) and prompt.turn.texts],
        "plain replies": replies,
    }
    measured: dict[str, Exact] = {}
    for skill, prompts in skills.items():
        texts = [prompt.text for prompt in prompts]
        greedy, sampled = (complete(model, tokenizer, texts, mode, seed) for mode in (False, True))
        measured[skill] = Exact(
            len(prompts), called(greedy, prompts), called(sampled, prompts), matched(greedy, prompts)
        )
    return measured


def measure_choice(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, count: int, seed: int, held_out: bool
) -> tuple[list[Spread], list[float]]:
    """The spread over the tools that fit, per request that leaves a choice; and per result that another tool takes, the
    probability of another call over that of a call or an answer."""
    spreads: list[Spread] = []
    going_on: list[float] = []
    for one in draw(count, seed, held_out, ("open",)):
        for prompt in evaluation_prompts(tokenizer, one):
            turn = prompt.turn
            if prompt.first and len(turn.calls) > 1:
                spreads.append(spread(probabilities(model, tokenizer, prompt.text, turn.calls)))
            elif turn.calls and turn.texts:
                shares = probabilities(model, tokenizer, prompt.text, turn.calls + turn.texts)
                going_on.append(sum(shares[: len(turn.calls)]) / sum(shares))
    return spreads, going_on


def main() -> None:
    """Print all scores: on new episodes like those of training, and on held-out words and sentence frames."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=path(), help="folder of the policy")
    parser.add_argument("--count", type=int, default=400, help="episodes per measure")
    parser.add_argument("--seed", type=int, default=1, help="seed of the episodes and of sampling")
    options = parser.parse_args()
    model, tokenizer = load(options.folder)
    for held_out in (False, True):
        print("held-out words and wordings" if held_out else "new episodes of the training kind")
        exact = measure_exact(model, tokenizer, options.count, options.seed, held_out)
        for skill, score in exact.items():
            print(
                f"  {skill:<14} {score.count:4} prompts   exact: greedy {score.greedy:6.1%}   sampled {score.sampled:6.1%}   "
                f"with the thought: {score.to_the_letter:6.1%}"
            )
        spreads, going_on = measure_choice(model, tokenizer, options.count, options.seed, held_out)
        print(
            f"  open choices   {len(spreads):4} prompts   fitting {mean(spread.mass for spread in spreads):.1%}, "
            f"evenness {mean(spread.evenness for spread in spreads):.2f}, "
            f"largest share {mean(spread.largest for spread in spreads):.2f}"
        )
        spread_out = mean(0.15 < share < 0.85 for share in going_on)
        print(
            f"  going on       {len(going_on):4} prompts   mean {mean(going_on):.2f}, "
            f"between 0.15 and 0.85 in {spread_out:.0%}"
        )


if __name__ == "__main__":
    main()
