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
    return command_from(_origin(), extra)


def install_source(extras: str) -> tuple[str, dict[str, str]]:
    """What installs this package on another machine: the requirement, and the files to copy there, as {there: here}.

    Raises ConfigError if this installation's source is unknown.
    """
    return source_from(_origin(), extras)


def _origin() -> dict[str, object]:
    try:
        origin = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        origin = None
    return json.loads(origin) if origin else {}


def source_from(origin: Mapping[str, object], extras: str) -> tuple[str, dict[str, str]]:
    """The requirement and files for an origin as PEP 610 records it.

    >>> source_from({"url": "file:///srv/offbook", "dir_info": {"editable": True}}, "gpu")
    ('./offbook-source[gpu]', {'~/offbook-source': '/srv/offbook'})
    >>> source_from({"url": "https://example.com/offbook.git", "vcs_info": {"vcs": "git", "commit_id": "a1"}}, "gpu")
    ('offbook[gpu] @ git+https://example.com/offbook.git@a1', {})
    """
    url = str(origin.get("url", ""))
    match origin:
        case {"dir_info": _}:
            return f"./offbook-source[{extras}]", {"~/offbook-source": _folder(url)}
        case {"vcs_info": {"vcs": str(vcs), "commit_id": str(commit)}}:
            return f"{DISTRIBUTION}[{extras}] @ {vcs}+{url}@{commit}", {}
        case {"archive_info": _} if url.startswith("file:"):
            name = _folder(url).rsplit("/", 1)[-1]
            return f"./{name}[{extras}]", {f"~/{name}": _folder(url)}
        case {"archive_info": _}:
            return f"{DISTRIBUTION}[{extras}] @ {url}", {}
        case _:
            raise ValueError(
                "this installation does not say where it came from: install Offbook from a checkout or wheel"
            )


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
