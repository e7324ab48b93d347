"""The tokenizer: byte-level BPE in which a word has the same tokens wherever it stands, so that the policy can copy
it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# transformers and torch carry partial types.

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .basics import basic_episode
from .episodes import Message, ToolSchema
from .words import english, word

VOCABULARY = 1545
"""Number of tokens, markup included."""
CONTEXT = 4096
"""Longest sequence in tokens."""
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MAX_TOOLS = 16
NUMBERS = [f"<{number}>" for number in range(1, MAX_TOOLS + 1)]
"""The numbers of tools, one token each."""
MARKUP = ["<tool_call>", "</tool_call>", "<tools>", "</tools>", "<think>", "</think>", *NUMBERS]
# Letters never take the space before them, digits stand alone, and JSON's punctuation forms runs such as `": "`.
PIECES = r"""\p{L}+|\p{N}|["{}\[\]:, ]+|[^\p{L}\p{N}"{}\[\]:, ]"""


def corpus(seed: int, episodes: int) -> Iterator[str]:
    """The tokenizer's training texts: messages of basic episodes, and words with and without a capital."""
    rng = random.Random(seed)
    for _ in range(episodes):
        drawn = basic_episode(rng)
        for message in drawn.messages:
            yield message["role"]
            yield message.get("reasoning_content") or message["content"] or ""
            for call in message.get("tool_calls", ()):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                yield f'{{"name": "{name}", "arguments": {arguments}}}'
        yield " ".join(word(rng, held_out=False) for _ in range(10))
        yield " ".join(rng.choice(english(held_out=False)).capitalize() for _ in range(2))


def make_tokenizer(seed: int, episodes: int = 3000) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `episodes` episodes. Tool markup is no special token, so `skip_special_tokens` keeps it
    for tool-call parsers."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in CONTROL]
    markup = [AddedToken(text, special=False, normalized=False) for text in MARKUP]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKUP),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(seed, episodes), trainer)
    bpe.add_tokens([*markup, AddedToken("'", special=False, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template()
    return tokenizer


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Add the markup that an older tokenizer lacks, and return it.

    The single quote becomes a token too: transformers loads a Qwen2 model's tokenizer with Qwen2's split pattern, which
    cuts `'sorts` into `'s` and `orts`."""
    missing = [text for text in MARKUP if text not in tokenizer.get_vocab()]
    added = [AddedToken(text, special=False, normalized=False) for text in ["'", *missing]]
    tokenizer.add_tokens(added)  # pyright: ignore[reportArgumentType]  # the stub names another class of this name
    return missing


def template() -> str:
    """The chat template. It only appends: a conversation's tokens never change when messages are added."""
    return Path(__file__).with_name("chat_template.jinja").read_text()


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[ToolSchema], prompt: bool = False
) -> str:
    """The conversation as text. `prompt`: it ends where the assistant's turn begins."""
    text = tokenizer.apply_chat_template(
        [as_bundled(tokenizer, message) for message in messages],
        tools=list(tools) or None,
        tokenize=False,
        add_generation_prompt=prompt,
    )
    return cast(str, text)


def thinks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the policy writes its thought between think tags. `tiny` has no such tokens and writes it as the
    message's text."""
    return "<think>" in tokenizer.get_vocab()


def as_bundled(tokenizer: PreTrainedTokenizerBase, message: Message) -> Message:
    """The message as the policy's own chat template takes it."""
    if thinks(tokenizer) or "reasoning_content" not in message:
        return message
    return {**message, "content": message["reasoning_content"]}


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of a text, control tokens included."""
    return cast("list[int]", tokenizer(text)["input_ids"])


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token id that pads short rows."""
    return cast(int, tokenizer.pad_token_id)


def end_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token id of <|im_end|>, which ends a turn."""
    return cast(int, tokenizer.eos_token_id)
