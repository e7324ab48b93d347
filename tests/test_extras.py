"""The command that hints name: it installs an extra of this package, and never the other project of its name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offbook.base.errors import MissingExtraError, command_from, install_command
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///home/me/under%20study", "dir_info": {"editable": True}},
            'pip install -e "/home/me/under study[judge]"',
        ),
        ({"url": "file:///home/me/offbook", "dir_info": {}}, 'pip install "/home/me/offbook[judge]"'),
        (
            {"url": "file:///tmp/offbook-0.1.0-py3-none-any.whl", "archive_info": {}},
            'pip install "offbook[judge] @ file:///tmp/offbook-0.1.0-py3-none-any.whl"',
        ),
        (
            {"url": "https://example.com/offbook.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
            'pip install "offbook[judge] @ git+https://example.com/offbook.git@abc123"',
        ),
        ({}, 'pip install ".[judge]" in a checkout of Offbook'),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(origin: dict[str, object], command: str) -> None:
    assert command_from(origin, "judge") == command


def test_an_error_names_the_command_that_a_resolver_takes() -> None:
    """Of this very installation: pip reads the metadata behind the name, and needs nothing more."""
    assert install_command("judge") in str(MissingExtraError("litellm", "judge"))
    words = install_command("plot").removeprefix("pip install ").split('"')
    requirement = words[1] if "checkout of" not in words[-1] else f"{ROOT}[plot]"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-build-isolation", requirement],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Would install offbook-" in done.stdout
