"""A reasoning parser for vLLM, for models that do not always think before they answer.

vLLM's parsers treat a text without `</think>` as an incomplete thought. This parser gives the same result as the embedded
engine. vLLM imports this module by its name (`--reasoning-parser-plugin`).
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
    """Separates thought and answer of one choice.

    An answer with a grammar has no thought, because the grammar applies from the first token (`enable_in_reasoning`).
    """

    def __init__(self, tokenizer: TokenizerLike, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)  # pyright: ignore[reportUnknownMemberType]  # vLLM's is not annotated
        self._splitter = ThoughtSplitter()

    @property
    def reasoning_start_str(self) -> str:
        """The tag that opens a thought."""
        return OPEN

    @property
    def reasoning_end_str(self) -> str:
        """The tag that closes a thought."""
        return CLOSE

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """False: the prompt does not show whether the answer begins with a thought."""
        return False

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether the answer has begun."""
        return self._splitter.answering

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Empty: this parser splits text, not tokens. Hermes' tool parser needs only text."""
        return []

    def extract_reasoning(self, model_output: str, request: object) -> tuple[str | None, str | None]:
        """Thought and answer of a complete text; None for an empty one."""
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
        """The final parts of thought and answer after a piece of text; None if there are none."""
        thought, answer = self._splitter.push(delta_text)
        return DeltaMessage(reasoning=thought or None, content=answer or None) if thought or answer else None

    def get_streaming_fallback_content(self, text: str, request: object) -> str:
        """The end of the answer, which was held back because it could have become a thought."""
        return self._splitter.finish()[1]


ReasoningParserManager.register_module(OPTIONAL_THOUGHTS, module=OptionalThoughtsParser)
