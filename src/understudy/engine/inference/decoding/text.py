"""Tokens to text: whole, token by token, and up to a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

_LAG = 16
"""Tokens that may wait for the rest of a character before they are shown as they are."""


class Decoder:
    """Decodes tokens, leaving out special ones except those that carry meaning (`kept`: tool-call markup)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kept: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        keep = {vocabulary[text] for text in kept if text in vocabulary}
        self._skipped = frozenset(tokenizer.all_special_ids) - keep
        self._tokens: dict[int, tuple[str, list[int]]] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of these tokens."""
        shown = [token for token in token_ids if token not in self._skipped] if skip_special else list(token_ids)
        text = self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False)  # pyright: ignore[reportUnknownMemberType]  # transformers' tokenizers are only partly typed
        assert isinstance(text, str)
        return text

    def skips(self, token: int) -> bool:
        """Whether the token leaves no text."""
        return token in self._skipped

    def token(self, token: int) -> tuple[str, list[int]]:
        """One token's own text and the bytes of that text, as shown in logprobs."""
        found = self._tokens.get(token)
        if found is None:
            text = self.decode([token], skip_special=False)
            found = self._tokens[token] = (text, list(text.encode("utf-8", errors="replace")))
        return found


class TextStream:
    """Turns tokens into text as they come; characters split over tokens wait for their last byte."""

    def __init__(self, decoder: Decoder, *, skip_special: bool = True) -> None:
        self._decoder = decoder
        self._skip = skip_special
        self._ids: list[int] = []
        self._shown = 0  # tokens of _ids whose text is out

    def push(self, token: int) -> str:
        """Text that became complete with this token; may be empty."""
        if self._skip and self._decoder.skips(token):
            return ""
        self._ids.append(token)
        text = self._pending()
        if text.endswith("\ufffd") and len(self._ids) - self._shown < _LAG:
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        """What still waited for bytes that never came."""
        text = self._pending()
        self._advance()
        return text

    def _pending(self) -> str:
        before = self._decoder.decode(self._ids[: self._shown], skip_special=False)
        return self._decoder.decode(self._ids, skip_special=False)[len(before) :]

    def _advance(self) -> None:
        # The tokens shown last stay as context: some decoders drop the space before a first token.
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)


class StopWatch:
    """Watches sampled text for stop strings; used where tokens are sampled."""

    def __init__(self, decoder: Decoder, stop: Sequence[str], *, skip_special: bool = True) -> None:
        self._stream = TextStream(decoder, skip_special=skip_special)
        self._stop = tuple(stop)
        self._reach = max(map(len, self._stop)) - 1
        self._tail = ""

    def push(self, token: int, *, armed: bool = True) -> str | None:
        """The stop string completed by this token, if any; one not `armed` (min_tokens) never counts."""
        fresh = self._stream.push(token)
        window = self._tail + fresh
        self._tail = window[-self._reach :] if self._reach else ""
        if not armed:
            return None
        found = [(window.find(stop), stop) for stop in self._stop if stop in window]
        return min(found)[1] if found else None


class StopCutter:
    """Cuts text at a stop string and holds back what may become one; used where text is shown."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._reach = max(map(len, stop), default=1) - 1
        self._include = include
        self._held = ""

    def push(self, text: str) -> str:
        """Text that no stop string can reach any more."""
        self._held += text
        safe = len(self._held) - self._reach
        if safe <= 0:
            return ""
        out, self._held = self._held[:safe], self._held[safe:]
        return out

    def finish(self, text: str, stopped_by: str | None) -> str:
        """The rest. `text` is that of the last token; `stopped_by` the stop string that it completed, if any."""
        start = max(0, len(self._held) - self._reach)
        whole, self._held = self._held + text, ""
        at = whole.find(stopped_by, start) if stopped_by else -1
        if stopped_by is None or at < 0:
            return whole
        return whole[: at + (len(stopped_by) if self._include else 0)]
