"""Questions about the inbox whose answers are known, and what an answer earns. Run, it writes them as JSONL."""

import argparse
import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langgraph_email_agent.inbox import COTTAGES, Mail, make_mail

HELD_OUT_COTTAGES = COTTAGES[:3]
TRAIN_QUESTIONS, HELD_OUT_QUESTIONS = 600, 60
LONGEST_ANSWER = 200
"""In characters: an answer that lists all it found is none."""

WORDINGS = {
    "quote": (
        "How much does {sender} ask for the {job} at {cottage}?",
        "What will the work on the {job} of {cottage} cost me?",
        "Which price did we end up with for the {job} at {cottage}?",
    ),
    "visit": (
        "When does {sender} come to {cottage} for the {job}?",
        "On which day do they start with the {job} at {cottage}?",
        "Somebody has to let in the people who do the {job} at {cottage}. Which day is that?",
    ),
    "invoice": (
        "What is the number of the invoice for the {job} at {cottage}?",
        "Which invoice number did {sender} give for the {job} at {cottage}?",
        "I am paying for the {job} at {cottage}. Which invoice number do I put on the transfer?",
    ),
    "booking": (
        "When do the guests arrive at {cottage}?",
        "On which day does {sender} come to stay at {cottage}?",
        "By which day must {cottage} be ready for the guests?",
    ),
    "key": (
        "Where did {sender} leave the key of {cottage}?",
        "By what is the key of {cottage}?",
        "I stand in front of {cottage}. Where do I look for the key?",
    ),
    "sender": (
        "Who wrote to me about the {kind} for the {job} at {cottage}?",
        "Whose is the {kind} for the {job} at {cottage}?",
        "From whom is the {kind} for the {job} at {cottage}?",
    ),
}
"""What is asked -> ways to ask it, the last one for held-out questions."""

SHORT_WORDINGS = {
    "quote": ('how much is "{topic}"?', 'what do we owe for "{topic}"?', 'what does "{topic}" come to?'),
    "visit": ('when is "{topic}"?', 'on what day is "{topic}"?', 'which day has "{topic}"?'),
    "invoice": ('what number has "{topic}"?', 'give me the number of "{topic}"', 'we need to know "{topic}"'),
    "booking": ('when is "{topic}"?', 'on what day is "{topic}"?', 'which day has "{topic}"?'),
    "key": ('where is "{topic}"?', 'i look for "{topic}"', 'please find "{topic}"'),
    "sender": ('from whom is "{topic}"?', 'who is "{topic}" from?', 'and from whom is "{topic}"?'),
}
"""The same for a model that knows no language."""


@dataclass(frozen=True)
class Question:
    """A scenario: what is asked, the answer, and the id of the message that has it."""

    id: str
    question: str
    answer: str
    message: str


def make_questions(
    mails: Sequence[Mail], count: int, seed: int = 0, held_out: bool = False, brief: bool = False
) -> list[Question]:
    """Held-out questions are about other cottages, in other words, and the same for every seed."""
    rng = random.Random("held out" if held_out else seed)
    sources = [mail for mail in mails if mail.final and mail.fact and (mail.cottage in HELD_OUT_COTTAGES) == held_out]
    questions: list[Question] = []
    for index in range(count):
        if index % len(sources) == 0:
            rng.shuffle(sources)
        mail = sources[index % len(sources)]
        of_job = mail.kind in ("quote", "visit", "invoice")
        asked = "sender" if of_job and rng.random() < 1 / 3 else mail.kind
        wordings = (SHORT_WORDINGS if brief else WORDINGS)[asked]
        wording = wordings[-1] if held_out else rng.choice(wordings[:-1])
        topic = f"{mail.cottage} {mail.job} {mail.kind}" if of_job else f"{mail.cottage} {mail.kind}"
        question = wording.format(**vars(mail), topic=topic)
        answer = mail.sender if asked == "sender" else mail.fact
        questions.append(Question(f"{'held-out' if held_out else 'train'}-{index}", question, answer, mail.id))
    return questions


def reward(question: Question, state: dict[str, list[BaseMessage]]) -> dict[str, float]:
    """0.1 when a search found the message, 0.2 more when it was read, 0.7 more when the last message has the answer."""
    messages = state["messages"]
    turns = [message for message in messages if isinstance(message, AIMessage)]
    calls = [(call["name"], call["args"]) for turn in turns for call in turn.tool_calls]
    results = [message.text for message in messages if isinstance(message, ToolMessage)]
    found = any(f'"{question.message}"' in result for result in results)
    read = ("read_message", {"message": question.message}) in calls
    said = messages[-1].text
    right = len(said) <= LONGEST_ANSWER and states(said, question.answer)
    return {
        "reward": 0.1 * found + 0.2 * read + 0.7 * right,
        "success": float(right),
        "found": float(found),
        "read": float(read),
        "turns": float(len(turns)),
    }


def states(text: str, answer: str) -> bool:
    """Whether the text has the answer as whole words, in any usual spelling."""
    return f" {plain(answer)} " in f" {plain(text)} "


MONTHS = ("january", "february", "march", "april", "may", "june", "july")
MONTHS += ("august", "september", "october", "november", "december")


def plain(text: str) -> str:
    """Words and numbers with one space between: 1,250.40 and 1250,4 as 1250.4, May 3rd and 2026-05-03 as 3 may."""
    month = "|".join(MONTHS)
    text = re.sub(r"(\d),(?=\d{3}\b)", r"\1", text.lower())
    text = re.sub(r"(\d+)[.,](\d\d?)\b", lambda number: f"{float(f'{number[1]}.{number[2]}'):.9g}", text)
    text = re.sub(r"\d{4}-(\d\d)-(\d\d)", lambda day: f"{int(day[2])} {MONTHS[int(day[1]) - 1]}", text)
    text = re.sub(rf"({month}) (\d\d?)(?:st|nd|rd|th)?\b", r"\2 \1", text)
    text = re.sub(rf"\b0?(\d\d?)(?:st|nd|rd|th)?(?: of)? ({month})", r"\1 \2", text)
    return " ".join(re.findall(r"\d+\.\d+|[\w-]+", text))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--full",
        action="store_true",
        help="the whole inbox, for a real model; without it brief messages and short questions",
    )
    options = parser.parse_args()
    made = make_mail(brief=not options.full)
    for name, count, held_out in (("train", TRAIN_QUESTIONS, False), ("held_out", HELD_OUT_QUESTIONS, True)):
        lines = [json.dumps(asdict(each)) for each in make_questions(made, count, 0, held_out, not options.full)]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}.jsonl: {count} questions")
