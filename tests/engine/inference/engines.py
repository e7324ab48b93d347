"""What the tests of the embedded engine share: a tiny random model with an adapter, and ways to sample from it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from offbook.base.types import Sampling
from offbook.engine.inference.decoding.adapters import Adapter
from offbook.engine.inference.decoding.generation import Generation, Settings, Update
from offbook.engine.inference.decoding.model import ModelRunner
from offbook.engine.inference.decoding.scheduler import Scheduler

DEADLINE = 180.0
"""Seconds; only a machine under heavy load comes near it."""
CONTEXT = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ prefix or '' }}{% endif %}"
    "{# arguments is string #}"
)


def write_model(folder: Path) -> None:
    """A random Qwen2 of two layers with a byte-level tokenizer; its logits are spread enough to tell tokens apart."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=fast.eos_token_id,  # type: ignore[arg-type]  # one token, so an int
        pad_token_id=fast.pad_token_id,  # type: ignore[arg-type]
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def write_adapter(base: Path, folder: Path, *, seed: int, **options: Any) -> None:
    """A rank-4 adapter on all linear layers with random weights in both halves, as PEFT saves it."""
    torch.manual_seed(seed)
    model = get_peft_model(
        Qwen2ForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **options)
    )
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(str(folder))


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(33, 200), k=length))


def call(
    policy: ModelRunner,
    prompt_ids: tuple[int, ...],
    adapter: Adapter | None = None,
    *,
    streamed: bool = False,
    **settings: object,
) -> Generation:
    own = Sampling.model_validate({name: settings.pop(name) for name in Sampling.model_fields if name in settings})
    chosen = Settings(**{"max_tokens": 12, "ignore_eos": True, "sampling": own, **settings})  # type: ignore[arg-type]
    return Generation(prompt_ids, chosen, policy.eos, adapter, streamed=streamed)


@dataclass
class Sampled:
    """What came back of one call, its updates joined."""

    updates: list[Update] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for update in self.updates for logprob in update.logprobs]

    @property
    def last(self) -> Update:
        return self.updates[-1]


class Engine:
    """A scheduler whose updates are collected."""

    def __init__(
        self, policy: ModelRunner, *, max_batch: int = 64, on_death: Callable[[], None] = lambda: None
    ) -> None:
        self.policy = policy
        self._sampled: dict[Generation, Sampled] = {}
        self._changed = threading.Condition()
        self.scheduler = Scheduler(policy, self._deliver, max_batch=max_batch, on_death=on_death)
        self.scheduler.start()

    def submit(self, *generations: Generation) -> None:
        self.scheduler.submit(generations)

    def sample(self, *generations: Generation) -> list[Sampled]:
        """Submit calls and wait for their ends."""
        self.submit(*generations)
        return self.wait(*generations)

    def wait(self, *generations: Generation) -> list[Sampled]:
        """Wait for the ends of calls that were submitted."""
        with self._changed:
            assert self._changed.wait_for(lambda: all(map(self._ended, generations)), DEADLINE), "no end in time"
            return [self._sampled[generation] for generation in generations]

    def wait_for_tokens(self, generation: Generation, count: int) -> None:
        """Wait until a streamed call has given `count` tokens."""
        with self._changed:
            enough = lambda: len(self._sampled.get(generation, Sampled()).ids) >= count  # noqa: E731  # a predicate
            assert self._changed.wait_for(enough, DEADLINE), "too few tokens in time"

    def _ended(self, generation: Generation) -> bool:
        sampled = self._sampled.get(generation)
        return bool(sampled and (sampled.last.finish or sampled.last.failure))

    def _deliver(self, updates: Sequence[tuple[Generation, Update]]) -> None:
        with self._changed:
            for generation, update in updates:
                self._sampled.setdefault(generation, Sampled()).updates.append(update)
            self._changed.notify_all()


@torch.inference_mode()
def plain_logits(model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """Logits [C, V] before each completion token, by one plain forward pass without a cache."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def until_healthy(url: str) -> None:
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            threading.Event().wait(0.05)
    pytest.fail("the server did not start in time")
