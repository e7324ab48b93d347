"""Ina Roth lets holiday cottages by the sea. Her inbox: made here from a seed, and searched with SQLite's FTS5."""

import random
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta

COTTAGES = ("Avocet", "Curlew", "Dunlin", "Gannet", "Heron", "Kestrel", "Linnet", "Osprey", "Plover", "Puffin")
JOBS = ("bathroom", "boiler", "chimney", "fence", "floor", "garden", "kitchen", "roof")
FIRST_NAMES = ("Anka", "Bram", "Carla", "Dario", "Edda", "Femi", "Greta", "Hugo", "Ines", "Joost", "Katya", "Leon")
LAST_NAMES = ("Abbott", "Blum", "Castell", "Dorn", "Eklund", "Farrow", "Quist", "Rossi", "Tamm", "Voss", "Wilde")
PLACES = ("blue flower pot", "bread bin", "meter box", "old lantern", "rain barrel", "stone frog", "wood shed")
FIRST_DAY = date(2026, 1, 5)


@dataclass(frozen=True)
class Kind:
    """Messages that state one fact: how they put it, how a second message corrects it, and how often one does."""

    subject: str
    fact: str
    bodies: tuple[str, ...]
    corrections: tuple[str, ...] = ()
    corrected: float = 0.0


KINDS = {
    "quote": Kind(
        "{cottage} {job} quote",
        "amount",
        (
            "I had a look at the {job} of {cottage} this morning. Work and material come to {fact} euros, tax included.",
            "Thank you for showing me round {cottage}. For the {job} I ask {fact} euros. That holds for three months.",
        ),
        (
            "I have found another supplier, so the {job} at {cottage} is now {fact} euros. Forget what I wrote before.",
            "Sorry, I added that up wrongly. All in, the {job} at {cottage} comes to {fact} euros.",
        ),
        0.4,
    ),
    "visit": Kind(
        "{cottage} {job} visit",
        "day",
        (
            "We can come to {cottage} for the {job} on {fact}. Somebody has to let us in, we start at eight.",
            "The {job} at {cottage} is in our calendar for {fact}. Please keep the drive free for the van.",
        ),
        ("Two of us are ill, so we cannot keep that day. We will come for the {job} at {cottage} on {fact} instead.",),
        0.4,
    ),
    "invoice": Kind(
        "{cottage} {job} invoice",
        "number",
        (
            "The {job} at {cottage} is done. Our invoice has the number {fact}; please pay within two weeks.",
            "Here is invoice {fact} for the {job} at {cottage}. It was a pleasure to work for you.",
        ),
    ),
    "booking": Kind(
        "{cottage} booking",
        "day",
        (
            "We would love to stay at {cottage} again, four of us and the dog. We will arrive on {fact} before noon.",
            "Is {cottage} still free? If so we book a week from {fact} on. The children want the room under the roof.",
        ),
        ("Our ferry was moved, so we will be at {cottage} on {fact}, not on the day that we wrote.",),
        0.5,
    ),
    "key": Kind(
        "{cottage} key",
        "place",
        (
            "I have cleaned {cottage} and left the key by the {fact}. The kitchen needs new towels.",
            "The spare key of {cottage} is by the {fact} now; the old place was too easy to guess.",
        ),
    ),
    "thanks": Kind(
        "Our stay at {cottage}",
        "",
        (
            "What a lovely week at {cottage}! Only the {job} has seen better days. We will be back.",
            "Thank you for everything at {cottage}. The children still talk about the seals.",
        ),
    ),
}
"""`thanks` states nothing: messages that a search finds in vain."""


@dataclass(frozen=True)
class Mail:
    """A message, and what it states. `final`: no later message corrects it."""

    id: str
    date: date
    sender: str
    subject: str
    body: str
    kind: str
    cottage: str
    job: str
    fact: str
    final: bool = True


def make_mail(seed: int = 0, brief: bool = False) -> list[Mail]:
    """All messages by date, always the same for a seed. In a brief inbox, a body is its fact and nothing else."""
    rng = random.Random(seed)
    mails: list[Mail] = []
    for cottage in COTTAGES:
        for job in JOBS:
            mails += matter(rng, cottage, job, ("quote", "visit", "invoice"))
        for kind in ("booking", "key", "thanks", "thanks"):
            mails += matter(rng, cottage, rng.choice(JOBS), (kind,))
    mails.sort(key=lambda mail: mail.date)
    if brief:
        mails = [replace(mail, body=mail.fact) for mail in mails]
    return [replace(mail, id=f"m-{number}") for number, mail in enumerate(mails, 100)]


def matter(rng: random.Random, cottage: str, job: str, kinds: Sequence[str]) -> Iterator[Mail]:
    """What one person writes about one matter, in order; a day that was announced passes before the next kind."""
    first_name, last_name = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES)
    day = FIRST_DAY + timedelta(rng.randrange(120))
    for name in kinds:
        kind = KINDS[name]
        subject = kind.subject.format(job=job, cottage=cottage)
        corrected = rng.random() < kind.corrected
        for bodies, prefix in [(kind.bodies, ""), (kind.corrections, "Re: ")][: 1 + corrected]:
            day += timedelta(rng.randint(2, 5))
            announced = day + timedelta(rng.randint(8, 30))
            fact = draw_fact(rng, kind.fact, announced)
            text = rng.choice(bodies).format(job=job, cottage=cottage, fact=fact)
            yield Mail(
                id="",
                date=day,
                sender=f"{first_name} {last_name}",
                subject=prefix + subject,
                body=f"Hello Ina,\n{text}\n{first_name}",
                kind=name,
                cottage=cottage,
                job=job,
                fact=fact,
                final=bool(prefix) or not corrected,
            )
        day = announced if kind.fact == "day" else day


def draw_fact(rng: random.Random, fact: str, announced: date) -> str:
    """An amount, the announced day, an invoice number, or a place."""
    return {
        "amount": f"{rng.randint(90, 990)}.{rng.choice((20, 40, 50, 80))}",
        "day": f"{announced.day} {announced:%B}",
        "number": f"{rng.choice('ABKRT')}-{rng.randint(1000, 9999)}",
        "place": rng.choice(PLACES),
    }.get(fact, "")


class Inbox:
    """Messages in a database in memory, with a full-text index over their senders, subjects and bodies."""

    def __init__(self, mails: Sequence[Mail]) -> None:
        self.database = sqlite3.connect(":memory:", check_same_thread=False)  # tools run in threads, and only read
        self.database.execute(
            "CREATE VIRTUAL TABLE mail USING fts5(id UNINDEXED, date UNINDEXED, sender, subject, body, tokenize=porter)"
        )
        rows = [(mail.id, str(mail.date), mail.sender, mail.subject, mail.body) for mail in mails]
        self.database.executemany("INSERT INTO mail VALUES (?, ?, ?, ?, ?)", rows)

    def search(self, words: str, sender: str = "", after: str = "", before: str = "") -> list[dict[str, str]]:
        """Up to ten messages that have all of the words, the newest first; dates are like 2026-05-31."""
        terms = " ".join(f'"{word}"' for word in re.findall(r"\w+", words))
        found = self.database.execute(
            "SELECT id, date, subject FROM mail WHERE mail MATCH ? AND sender LIKE ? AND date > ? AND date < ? "
            "ORDER BY date DESC, id DESC LIMIT 10",
            (terms or '""', f"%{sender}%", after, before or "9999"),
        )
        return [dict(zip(("message", "date", "subject"), row, strict=True)) for row in found]

    def read(self, message: str) -> dict[str, str] | None:
        """The message with this id, or None."""
        row = self.database.execute("SELECT sender, body FROM mail WHERE id = ?", (message,)).fetchone()
        return dict(zip(("from", "body"), row, strict=True)) if row else None
