"""The date that chat templates write into prompts: one for all prompts of a directory, whatever the day and after a restart."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path

from offbook.base.errors import ConfigError
from offbook.base.server_options import ServerOptions

logger = logging.getLogger(__name__)
PROMPT_DATE = "prompt_date"
"""The file in a directory."""


def with_prompt_date(options: ServerOptions) -> ServerOptions:
    """The options with the date that they name, else the one recorded in the directory, else today's, and record it.

    Raises ConfigError for a damaged record.
    """
    file = options.dir / PROMPT_DATE
    recorded = _recorded(file)
    date = options.engine.prompt_date or recorded or datetime.date.today()
    if recorded is not None and date != recorded:
        logger.warning("Prompts had the date %s until now, and have %s from now on (--prompt-date)", recorded, date)
    if date != recorded:
        file.write_text(f"{date}\n", encoding="utf-8")
    return options.model_copy(update={"engine": options.engine.model_copy(update={"prompt_date": date})})


def _recorded(file: Path) -> datetime.date | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
        return datetime.date.fromisoformat(text)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{file} holds no date: write one such as 2026-11-29, the date of its prompts") from error
