"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json, and the checks of both against the file."""

# pyright: reportUnknownMemberType=false
# tokenizers and jinja2 are only partly typed.

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from offbook.base.errors import ConfigError
from offbook.base.types import Json

from .gguf_file import GgufFile

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"qwen2": _CONTRACTIONS + r"\p{N}" + _REST, "llama-bpe": _CONTRACTIONS + r"\p{N}{1,3}" + _REST}
"""`tokenizer.ggml.pre` -> where its words end, as in llama.cpp's src/llama-vocab.cpp and the original tokenizer.json files."""
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
"""Control tokens that end an answer whatever the file's keys say, as in llama.cpp."""
_SPACE = "▁"
_RANGES = {
    "Latin": (0x61, 0x17F), "Greek": (0x391, 0x3FF), "Cyrillic": (0x410, 0x44F), "Hebrew": (0x5D0, 0x5EA),
    "Arabic": (0x620, 0x64A), "Devanagari": (0x904, 0x939), "Thai": (0xE01, 0xE30), "Georgian": (0x10D0, 0x10F0),
    "Hangul": (0xAC00, 0xD7A3), "Kana": (0x3041, 0x30FA), "Han": (0x4E00, 0x9FA5), "Emoji": (0x1F600, 0x1F64F),
}  # fmt: skip
TEXTS = 2_000


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer. `ends`: the ids that end an answer. `ids`: `bos`, `eos`, `pad` and `unk`, as far as the file has them."""

    tokenizer: Tokenizer
    ids: dict[str, int]
    ends: tuple[int, ...]
    tokens: list[str]
    template: str | None

    @property
    def special(self) -> dict[str, Json]:
        """The texts of the named tokens: `bos_token` and so on."""
        return {f"{name}_token": self.tokens[index] for name, index in self.ids.items()}

    def config(self, context: int) -> dict[str, Json]:
        """The content of tokenizer_config.json."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **self.special}
        template = {} if self.template is None else {"chat_template": self.template}
        return {**config, "model_max_length": context, **template}


def read_vocabulary(file: GgufFile, rows: int) -> Vocabulary:
    """Build the tokenizer of a file whose embeddings have so many rows. Raises ConfigError."""
    tokens = file.texts("tokenizer.ggml.tokens")
    kinds: list[int] = file.numbers("tokenizer.ggml.token_type").tolist()
    if len(kinds) != len(tokens) or not 0 < len(tokens) <= rows or len(set(tokens)) != len(tokens):
        raise file.fault(
            f"{len(tokens)} tokens with {len(kinds)} types, {len(set(tokens))} of them different, do not fit {rows} embeddings"
        )
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    keys = {name: f"tokenizer.ggml.{long}_token_id" for name, long in names.items()}
    ids = {name: file.whole(key, len(tokens) - 1, least=0) for name, key in keys.items() if key in file.keys}
    if "eos" not in ids:
        raise file.fault("it names no token that ends an answer (tokenizer.ggml.eos_token_id)")
    ids.setdefault("pad", ids["eos"])
    model = file.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(file, tokens, kinds)
    elif model in ("llama", "gemma"):
        tokenizer = _sentence_piece(file, tokens, kinds)
    else:
        raise file.fault(f"the tokenizer {model[:32]!r} is not supported (gpt2 and llama are)")
    control = {index for index, kind in enumerate(kinds) if kind == _CONTROL} | {ids["eos"]}
    for special, chosen in (
        (True, control),
        (False, {i for i, kind in enumerate(kinds) if kind == _USER_DEFINED} - control),
    ):
        added = [AddedToken(tokens[index], special=special, normalized=False) for index in sorted(chosen)]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    begins = model != "gpt2" or file.text("tokenizer.ggml.pre") == "llama-bpe"  # llama.cpp's default
    if file.flag("tokenizer.ggml.add_bos_token", begins) and "bos" in ids:
        bos = tokens[ids["bos"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, ids["bos"])]
        )
    others = [f"tokenizer.ggml.{name}_token_id" for name in ("eot", "eom")]
    ends = {ids["eos"], *(file.whole(key, len(tokens) - 1, least=0) for key in others if key in file.keys)}
    ends |= {index for index in control if tokens[index] in _ENDS}
    template = file.text("tokenizer.chat_template") if "tokenizer.chat_template" in file.keys else None
    vocabulary = Vocabulary(tokenizer, ids, tuple(sorted(ends)), tokens, template)
    _check_ids(file, vocabulary, control)
    return vocabulary


def _byte_level(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    kind = file.text("tokenizer.ggml.pre")
    vocabulary = {
        token: index for index, token in enumerate(tokens) if kinds[index] != _UNUSED
    }  # those fill up embeddings
    merges: list[tuple[str, str]] = []
    for merge in file.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise file.fault(f"the merge {merge[:64]!r} names no tokens of the vocabulary")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind == "llama-bpe"))
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), "isolated")
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, words])
    else:
        raise file.fault(f"the pre-tokenizer {kind[:32]!r} is not supported (use one of smollm, {', '.join(_SPLITS)})")
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores: list[float] = file.numbers("tokenizer.ggml.scores").tolist()
    if len(scores) != len(tokens):
        raise file.fault(f"{len(tokens)} tokens have {len(scores)} scores")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == 2), None)
    merges = _merges(tokens, scores, vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = file.flag("tokenizer.ggml.add_space_prefix", file.text("general.architecture") == "llama")
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer


def _merges(tokens: list[str], scores: list[float], ids: dict[str, int]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores stand for: the highest score first, and shorter parts last, as in transformers'
    `generate_merges`."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, min(len(token), 256))]
        known = sorted((ids[left], ids[right], left, right) for left, right in pairs if left in ids and right in ids)
        ranked += [(score, len(left), len(right), left, right) for _, _, left, right in known]
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _check_ids(file: GgufFile, vocabulary: Vocabulary, control: set[int]) -> None:
    for index in sorted(control | set(vocabulary.ids.values())):
        token = vocabulary.tokens[index]
        if vocabulary.tokenizer.token_to_id(token) != index:
            raise file.fault(
                f"the token {token[:64]!r} has the id {vocabulary.tokenizer.token_to_id(token)}, and {index} in the file"
            )
        if index in control and vocabulary.tokenizer.encode(token, add_special_tokens=False).ids != [index]:
            raise file.fault(f"the control token {token[:64]!r} is not encoded as its id {index}")


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises ConfigError."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises Exception itself
        raise ConfigError(f"{path} cannot be read: {error}") from error


def sample_texts(count: int = TEXTS, seed: int = 0) -> Iterator[str]:
    """Texts in 12 scripts with digits, punctuation and spaces, in the composed form (NFC) that some tokenizers make of all."""
    source = random.Random(seed)
    ranges = list(_RANGES.values())
    for number in range(count):
        low, high = ranges[number % len(ranges)]
        words: list[str] = []
        for _ in range(source.randint(1, 12)):
            letters = "".join(chr(source.randint(low, high)) for _ in range(source.randint(1, 9)))
            words.append(source.choice((letters, letters, letters.capitalize(), str(source.randint(0, 99999)))))
        text = "".join(word + source.choice((" ", " ", ", ", ".\n", "  ", "'s ", "\t", "-", "!")) for word in words)
        text = "".join(char for char in text if unicodedata.category(char) != "Cn")
        yield unicodedata.normalize("NFC", text)


def check_round_trip(tokenizer: Tokenizer, original: Tokenizer | None = None) -> None:
    """Encode and decode 2,000 texts, and compare the ids with the original's if there is one. Raises ConfigError."""
    for text in sample_texts():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if (decoded := tokenizer.decode(ids, skip_special_tokens=False)) != text:
            raise ConfigError(
                f"the tokenizer does not return the text {text[:80]!r}, but {decoded[:80]!r}: the base is not added"
            )
        if original is not None and (other := original.encode(text, add_special_tokens=False).ids) != ids:
            raise ConfigError(
                f"the tokenizer and the folder's tokenizer.json disagree on {text[:80]!r}: {ids[:20]}, {other[:20]}: the base is not added"
            )


def check_template(template: str, tokenizer: Tokenizer, named: dict[str, Json]) -> None:
    """Render a conversation as the server does: control tokens that the template writes must become ids. Raises ConfigError."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: "1 January 2026")  # pyright: ignore[reportUnknownLambdaType]
    messages = [{"role": "user", "content": "question-probe"}, {"role": "assistant", "content": "answer-probe"}]
    try:
        text = environment.from_string(template).render(messages=messages, add_generation_prompt=True, **named)
    except (TemplateError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the chat template cannot be rendered: {str(error)[:200]}: the base is not added") from error
    if "question-probe" not in text or "answer-probe" not in text:
        raise ConfigError("the chat template leaves out the messages of a conversation: the base is not added")
    spelled = re.findall(r"<\|\w+\|>|<(?:start|end)_of_turn>", text)
    if lost := [token for token in spelled if len(tokenizer.encode(token, add_special_tokens=False).ids) != 1]:
        raise ConfigError(
            f"the chat template writes {lost[0]!r}, which is no token of the vocabulary: the base is not added"
        )


def _refuse(message: str) -> None:
    raise ValueError(message)
