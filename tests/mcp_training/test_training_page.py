"""The Python of docs/mcp_training.md runs, and the page names what there is."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from offbook.trainer.options import TrainerOptions
from offbook_mcp.training.mcp_trainer import MCPTrainerOptions
from tests.docs.test_pages import code_of, run
from tests.paths import ROOT

PAGE = (ROOT / "docs/mcp_training.md").read_text("utf-8")


@pytest.mark.slow("whole trainings")
def test_the_page_runs_top_to_bottom(tmp_path: Path) -> None:
    printed = run("\n".join(code_of("mcp_training.md")), tmp_path).splitlines()
    assert printed[0] == "target     shop (in this process)"
    assert printed[1] == "tools      2; all are shown; rollouts share one session (every tool is read-only)"
    assert printed[2].startswith(
        "scenarios  none yet: 12 are made from the tools' schemas and what they answer, about 9 to train on and 3 held out, and kept "
    )
    assert not (tmp_path / "shop-records").exists()


def test_the_page_names_every_option() -> None:
    own = {field.name for field in fields(MCPTrainerOptions)} - {field.name for field in fields(TrainerOptions)}
    assert [name for name in own if f"`{name}`" not in PAGE] == []
