"""The README in the package's metadata: with `REPOSITORY_URL`, its links and images lead to the repository, as PyPI needs them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+\))")


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme` and `urls`. A wheel built from a source distribution has what that one was built with."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        repository = os.environ.get("REPOSITORY_URL", "").rstrip("/")
        metadata["urls"] = {}
        if repository:
            tag = f"v{metadata['version']}"
            text = absolute(text, repository, tag)
            metadata["urls"] = {
                "Repository": repository,
                "Issues": f"{repository}/issues",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, tag: str) -> str:
    """The same Markdown with each relative link leading to the repository at `tag`: images to their bytes, pages to the view."""

    def link(match: re.Match[str]) -> str:
        view = "raw" if match[1].startswith("!") else "blob"
        return f"{match[1]}{repository}/{view}/{tag}/{match[2]}"

    return LINK.sub(link, text)
