"""The tables of docs/coming_from.md and the hints of `option_names` name the same options, in both directions."""

from __future__ import annotations

import re

import pytest

from offbook.base.option_names import FOREIGN, NO_COUNTERPART, owned_options
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "coming_from.md").read_text("utf-8")
OURS = {option for options in owned_options().values() for option in options}
NO_OPTIONS = {
    # taken, and an index of verl's
    *("n", "best_checkpoint_metric"),
    # sections, and arguments of a rollout
    *("agent", "rollout", "resources", "task", "train", "dev", "weights"),
    # functions
    *("delete_checkpoints", "generate_scenarios", "init_chat_model", "ruler", "ruler_score_group", "wrap_rollout"),
    # agent-lightning
    *("agl", "agl_base_url", "agl_key", "async_rollout", "attempt_id", "emit_reward", "fit", "get_base_url"),
    *("model_request", "reward_fillna_value", "rollout_id", "trace_aggregator"),
}
"""Names in the tables' first columns that nobody passes to one of our objects as an option."""


def names(text: str) -> list[str]:
    """The last parts of the dotted names in the code of a cell. Values are no names."""
    code = " ".join(re.findall(r"`+([^`]+)`+", text))
    without_values = re.sub(r'"[^"]*"|=(?![ ,)])[\w{}.\-]+', " ", code)
    return re.findall(r"(?<![\w/.-])(?:\w+\.)*([a-z_]\w*)(?![\w/.-])", without_values)


def rows() -> list[tuple[str, str]]:
    cells = [line.strip("|").split(" | ", 1) for line in PAGE.splitlines() if line.startswith("| ")]
    return [(cell[0], cell[1]) for cell in cells if len(cell) == 2 and cell[1].strip()]


def hints(name: str) -> list[set[str]]:
    """Our names in the hints for a foreign name: everywhere, and at one object."""
    everywhere = {option: hint for option, hint in FOREIGN.items() if not option.startswith(("Llm.", "Ruler."))}
    texts = [hint for option, hint in everywhere.items() if option.split(".")[-1] == name]
    return [{hint} if hint.isidentifier() else set(re.findall(r"(\w+)(?=[=(])", hint)) for hint in texts]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:60])
def test_a_row_of_the_page_and_the_hint_name_the_same_option(row: tuple[str, str]) -> None:
    foreign, ours = row
    words = set(re.findall(r"\w+", ours))
    for name in names(foreign):
        if name not in FOREIGN and name in OURS | NO_OPTIONS:
            continue
        assert hints(name), f"{name!r} has no hint in option_names.FOREIGN"
        assert any(hint <= words for hint in hints(name)), f"{name!r}: the page has {ours!r}, the hint {hints(name)}"


def test_every_hint_is_on_the_page() -> None:
    words = set(re.findall(r"\w+", PAGE))
    assert [
        name for name in FOREIGN if not name.startswith(("Llm.", "Ruler.")) and name.split(".")[-1] not in words
    ] == []


def test_what_the_page_calls_without_counterpart_is_refused_so() -> None:
    paragraphs = " ".join(re.findall(r"^No counterpart: .*?(?=\n\n|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
    mentioned = set(names(paragraphs))
    assert set(NO_COUNTERPART) <= mentioned
    elsewhere = {"train_sft", "adv_estimator", "loss_type", "mask_truncated_completions", "grpo"}
    assert mentioned - set(NO_COUNTERPART) - elsewhere - OURS - NO_OPTIONS == set()
