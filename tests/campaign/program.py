"""A program as a rollout of the campaign: it calls its model in some API, acknowledges each answer in a journal, and
leaves a reward.

    python -m tests.campaign.program JOURNAL SEED

What is not answered is asked for again. With no file for a reward, as under `offbook wrap`, it leaves none.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from offbook.base.server_sent_events import EventReader

from .calls import DOORS, Body, Wish, refusal
from .journal import Journal

AGAIN_SECONDS = 0.3


def main() -> None:
    journal, chance = Journal(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
    trajectory, root = os.environ["OFFBOOK_TRAJECTORY"], os.environ["ANTHROPIC_BASE_URL"]
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    with httpx.Client(base_url=root, headers=headers, timeout=120, trust_env=False) as http:
        for turn in range(chance.randint(1, 2)):
            door = chance.choice(sorted(DOORS))
            wish = Wish(os.environ["OFFBOOK_MODEL"], f"Turn {turn}", 4, chance.randrange(2**31), chance.random() < 0.5)
            while (answer := _asked(http, door, wish, f"{trajectory}-{turn}", journal)) is None:
                time.sleep(AGAIN_SECONDS)
            journal.add("call", trajectory=trajectory, door=door, **answer)
    if (file := os.environ.get("OFFBOOK_REWARD_FILE")) is not None:
        Path(file).write_text(str(chance.randrange(2)))


def _asked(http: httpx.Client, door: str, wish: Wish, key: str, journal: Journal) -> Body | None:
    path, fields = DOORS[door].path(wish), dict[str, Any]()
    try:
        answer = http.post(path, json=DOORS[door].body(wish), headers={"idempotency-key": key})
        if answer.status_code >= 500 or answer.status_code in (408, 429):
            fields = {"status": answer.status_code, "why": answer.text[:300]}
        elif answer.status_code != 200:
            raise SystemExit(f"{path}: {answer.status_code} {answer.text[:300]}")
        else:
            bodies: list[Body] = [answer.json()] if not wish.stream else _events(answer.content)
            if bodies and not refusal(bodies) and (found := DOORS[door].answered(bodies)) is not None:
                return found
            fields = {"why": f"{bodies[-1:]}"[:300]}
    except (httpx.TransportError, ValueError, KeyError) as error:
        fields = {"why": repr(error)}
    journal.add("unanswered", path=path, **fields)
    return None


def _events(content: bytes) -> list[Body]:
    return [json.loads(data) for data in EventReader().push(content) if data != b"[DONE]"]


if __name__ == "__main__":
    main()
