"""The pip command that installs an extra of this package, from the source that the package was installed from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "offbook"
"""Name of the distribution. It has no release yet, so no command may install it from the package index."""


def install_command(extra: str) -> str:
    """`pip install ...` for an extra, from the checkout, wheel or repository of this installation; else from a checkout
    in the current folder."""
    try:
        origin = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    return command_from(json.loads(origin) if origin else {}, extra)


def command_from(origin: Mapping[str, object], extra: str) -> str:
    """The command for an origin as PEP 610 records it (`direct_url.json`).

    >>> command_from({"url": "file:///srv/offbook", "dir_info": {"editable": True}}, "server")
    'pip install -e "/srv/offbook[server]"'
    """
    url = str(origin.get("url", ""))
    match origin:
        case {"dir_info": {"editable": True}}:
            return f'pip install -e "{_folder(url)}[{extra}]"'
        case {"dir_info": _}:
            return f'pip install "{_folder(url)}[{extra}]"'
        case {"vcs_info": {"vcs": str(vcs), "commit_id": str(commit)}}:
            return f'pip install "{DISTRIBUTION}[{extra}] @ {vcs}+{url}@{commit}"'
        case {"archive_info": _}:
            return f'pip install "{DISTRIBUTION}[{extra}] @ {url}"'
        case _:
            return f'pip install ".[{extra}]" in a checkout of Offbook'


def _folder(url: str) -> str:
    return url2pathname(urlsplit(url).path)
