"""A reasoning parser of vLLM for models that may think before they answer, and may not.

vLLM's own parsers take a text without `</think>` for a thought that was cut. This one reads what the embedded engine reads. vLLM
imports this module by its name (`--reasoning-parser-plugin`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager

from ..chat.families import OPTIONAL_THOUGHTS
from ..chat.thoughts import CLOSE, OPEN, ThoughtSplitter

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike


class OptionalThoughtsParser(ReasoningParser):
    """Thought and answer of one choice. Grammars begin with the first token (`enable_in_reasoning`): shaped answers have
    no thought."""

    def __init__(self, tokenizer: TokenizerLike, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)  # pyright: ignore[reportUnknownMemberType]  # vLLM's is not annotated
        self._splitter = ThoughtSplitter()

    @property
    def reasoning_start_str(self) -> str:
        """The tag that opens a thought."""
        return OPEN

    @property
    def reasoning_end_str(self) -> str:
        """The tag that closes it."""
        return CLOSE

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """No prompt is past its thought: whether there is one, the answer tells."""
        return False

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether the answer has begun."""
        return self._splitter.answering

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Not known: text is what is split. Hermes' parser reads text."""
        return []

    def extract_reasoning(self, model_output: str, request: object) -> tuple[str | None, str | None]:
        """Thought and answer of a whole text; None for an empty one."""
        splitter = ThoughtSplitter()
        first, last = splitter.push(model_output), splitter.finish()
        return first[0] + last[0] or None, first[1] + last[1] or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """What a piece of text makes certain."""
        thought, answer = self._splitter.push(delta_text)
        return DeltaMessage(reasoning=thought or None, content=answer or None) if thought or answer else None

    def get_streaming_fallback_content(self, text: str, request: object) -> str:
        """The answer that was held back until the end: it might have become a thought."""
        return self._splitter.finish()[1]


ReasoningParserManager.register_module(OPTIONAL_THOUGHTS, module=OptionalThoughtsParser)
