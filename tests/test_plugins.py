"""Plugins: found without being loaded, loaded by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offbook import plugins
from offbook.base.errors import ConfigError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    facts = tmp_path / "plugged-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[offbook.sinks]\nmine = plugged_sinks:Mine\nbroken = plugged_sinks:Gone\n")
    (tmp_path / "plugged_sinks.py").write_text("class Mine: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_plugin_is_loaded_only_when_asked_for(installed: Path) -> None:
    assert {"broken", "mine"} <= set(plugins.names("offbook.sinks"))
    assert "plugged_sinks" not in sys.modules
    assert getattr(plugins.load("offbook.sinks", "mine"), "__name__") == "Mine"  # noqa: B009


def test_a_plugin_is_described_without_being_loaded(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "plugged_sinks", raising=False)
    (installed / "plugged_sinks.py").write_text('"""Sends rollouts\n\nto nobody."""\nraise RuntimeError("loaded")\n')
    assert plugins.summary("offbook.sinks", "mine") == "Sends rollouts"
    assert plugins.summary("offbook.commands", "mcp") == "Inspect an MCP server, and train a model to use its tools."
    (installed / "plugged_sinks.py").unlink()
    assert plugins.summary("offbook.sinks", "mine") is None


def test_an_unknown_or_broken_plugin_is_named(installed: Path) -> None:
    with pytest.raises(ConfigError, match=r"no plugin 'other' in 'offbook.sinks'; installed: broken, .*mine"):
        plugins.load("offbook.sinks", "other")
    with pytest.raises(ConfigError, match=r"plugin 'broken' \(plugged_sinks:Gone\) cannot be loaded"):
        plugins.load("offbook.sinks", "broken")
