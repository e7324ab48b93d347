"""The e-mail example's inbox and questions, checked by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime

import pytest
from langgraph_email_agent.inbox import Inbox, Mail, make_mail
from langgraph_email_agent.questions import HELD_OUT_COTTAGES, make_questions, plain, states

MAIL = Mail(
    id="m-1",
    date=date(2026, 2, 3),
    sender="Greta Quist",
    subject="Heron boiler quote",
    body="Hello Ina,\nthe boiler at Heron comes to 412.50 euros.",
    kind="quote",
    cottage="Heron",
    job="boiler",
    fact="412.50",
    final=False,
)
LATER = replace(MAIL, id="m-2", date=date(2026, 2, 7), subject="Re: Heron boiler quote", fact="398.20", final=True)
OTHER = replace(MAIL, id="m-3", date=date(2026, 3, 1), sender="Bram Voss", subject="Plover boilers", body="They leak.")


@pytest.fixture
def inbox() -> Inbox:
    return Inbox([MAIL, LATER, OTHER])


def found(inbox: Inbox, *words: str, **limits: str) -> list[str]:
    return [hit["message"] for hit in inbox.search(*words, **limits)]


def test_a_search_finds_messages_with_all_words_the_newest_first(inbox: Inbox) -> None:
    assert found(inbox, "boiler") == ["m-3", "m-2", "m-1"]  # by its stem
    assert found(inbox, "heron BOILER quotes") == ["m-2", "m-1"]
    assert found(inbox, "Quist") == ["m-2", "m-1"]
    assert found(inbox, "Heron leak") == []
    assert inbox.search("leak") == [{"message": "m-3", "date": "2026-03-01", "subject": "Plover boilers"}]


def test_a_search_is_narrowed_by_sender_and_days(inbox: Inbox) -> None:
    assert found(inbox, "boiler", sender="voss") == ["m-3"]
    assert found(inbox, "boiler", after="2026-02-04") == ["m-3", "m-2"]
    assert found(inbox, "boiler", before="2026-02-07") == ["m-1"]
    assert found(inbox, "boiler", after="2026-02-03", before="2026-03-01") == ["m-2"]


@pytest.mark.parametrize("words", ["", "  ", '"', "*", 'boiler" OR "leak', "boiler NOT leak", "sender : Voss AND ("])
def test_no_words_of_a_model_are_a_syntax_error(inbox: Inbox, words: str) -> None:
    assert found(inbox, words) == []


def test_at_most_ten_hits_are_shown() -> None:
    assert len(Inbox([replace(MAIL, id=f"m-{number}") for number in range(12)]).search("boiler")) == 10


def test_a_message_is_read_by_its_id(inbox: Inbox) -> None:
    assert inbox.read("m-3") == {"from": "Bram Voss", "body": "They leak."}
    assert inbox.read("m-4") is None


def test_the_inbox_is_the_same_for_a_seed_and_as_large_as_it_should_be() -> None:
    mails = make_mail()
    assert mails == make_mail(seed=0) != make_mail(seed=1)
    assert 300 <= len(mails) <= 500
    assert [mail.id for mail in mails] == [f"m-{number}" for number in range(100, 100 + len(mails))]
    assert [mail.date for mail in mails] == sorted(mail.date for mail in mails)


def test_a_message_states_its_fact_and_a_brief_one_nothing_else() -> None:
    for mail, brief in zip(make_mail(), make_mail(brief=True), strict=True):
        assert mail.fact in mail.body
        assert mail.kind in ("booking", "key", "thanks") or mail.job in mail.body
        assert brief == replace(mail, body=mail.fact)


def test_people_come_on_the_day_they_said_and_send_the_invoice_later() -> None:
    visits = {(mail.cottage, mail.job): mail for mail in make_mail() if mail.kind == "visit" and mail.final}
    for invoice in (mail for mail in make_mail() if mail.kind == "invoice"):
        visit = visits[invoice.cottage, invoice.job]
        assert visit.date < datetime.strptime(f"{visit.fact} 2026", "%d %B %Y").date() < invoice.date
        assert visit.sender == invoice.sender


@pytest.mark.parametrize("brief", [False, True])
def test_every_question_has_its_answer_in_the_message_that_it_names(brief: bool) -> None:
    mails = make_mail(brief=brief)
    inbox = Inbox(mails)
    for question in make_questions(mails, 300, brief=brief) + make_questions(mails, 60, held_out=True, brief=brief):
        [source] = [mail for mail in mails if mail.id == question.message]
        read = inbox.read(question.message) or {}
        assert states(f"{read['from']} {read['body']}", question.answer)
        topic = question.question.split('"')[1] if brief else f"{source.cottage} {source.kind} {source.sender}"
        assert question.message in [hit["message"] for hit in inbox.search(topic)]


def test_held_out_questions_are_the_same_for_all_seeds_and_share_nothing_with_training() -> None:
    mails = make_mail()
    held_out = make_questions(mails, 60, seed=1, held_out=True)
    assert held_out == make_questions(mails, 60, seed=2, held_out=True)
    trained = make_questions(mails, 600, seed=1)
    assert trained != make_questions(mails, 600, seed=2)
    assert len({question.id for question in trained}) == 600
    assert not {question.message for question in held_out} & {question.message for question in trained}
    assert not any(cottage in question.question for question in trained for cottage in HELD_OUT_COTTAGES)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The roof costs 1,412.50 euros.", "1412.50"),
        ("It is €412,50.", "412.50"),
        ("She asks for 412.5", "412.50"),
        ("They come on May 3rd.", "3 May"),
        ("on the 3rd of May", "3 May"),
        ("The day is 2026-05-03.", "3 May"),
        ("it was GRETA QUIST", "Greta Quist"),
        ("Invoice **R-4821**", "R-4821"),
        ("by the blue flower pot", "blue flower pot"),
    ],
)
def test_an_answer_may_be_spelled_in_any_usual_way(text: str, answer: str) -> None:
    assert states(text, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It costs 1412.50 euros.", "412.50"),
        ("It costs 412.05 euros.", "412.50"),
        ("on 13 May", "3 May"),
        ("on 3 May", "13 May"),
        ("2026-03-05", "3 May"),
        ("Invoice R-48210", "R-4821"),
        ("", "R-4821"),
    ],
)
def test_another_value_is_no_answer(text: str, answer: str) -> None:
    assert not states(text, answer)


def test_plain_text_has_one_spelling_for_numbers_and_days() -> None:
    assert plain("Pay €1,250.40 by May 3rd!") == "pay 1250.4 by 3 may"
