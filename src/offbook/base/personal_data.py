"""Masks personal data that has a form: e-mail addresses, phone, card and account numbers, IP addresses.

Names, addresses and what a sentence says of a person have no form, and stay.
"""

from __future__ import annotations

import re

_EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}")
_IBAN = re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
_CARD = re.compile(r"(?<![\d.])\d(?:[ -]?\d){12,18}(?![\d.])")
_SSN = re.compile(r"(?<![\d-])\d{3}-\d{2}-\d{4}(?![\d-])")
_PHONE = re.compile(r"(?<![\w+.])(?:\+\d{1,3}|\(\d{2,5}\)|0\d{1,4}(?=[ /-]))(?:[ ()/-]{0,2}\d){6,12}(?![\w.])")
_IP = re.compile(r"(?<![\d.])(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}(?![\d.])")


def mask_personal(text: str) -> str:
    """The text with marks in place of personal data. Numbers count as a card or an account only if their check digits fit.

    >>> mask_personal("Box 4821 for ann@example.com, +44 20 7946 0958, card 4111 1111 1111 1111, 2026-11-26")
    'Box 4821 for [email], [phone], card [card], 2026-11-26'
    """
    if "@" in text:
        text = _EMAIL.sub("[email]", text)
    if not any(digit in text for digit in "0123456789"):
        return text
    text = _IBAN.sub(lambda match: "[account]" if _is_iban(match[0]) else match[0], text)
    text = _CARD.sub(lambda match: "[card]" if _fits_luhn(match[0]) else match[0], text)
    text = _SSN.sub("[ssn]", text)
    text = _IP.sub("[ip]", text)
    return _PHONE.sub("[phone]", text)


def _fits_luhn(text: str) -> bool:
    """Whether the last digit checks the others: ISO/IEC 7812-1, annex B."""
    digits = [int(char) for char in reversed(text) if char.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    """Whether the check digits fit: ISO 13616-1, modulo 97."""
    plain = text.replace(" ", "")
    return int("".join(str(int(char, 36)) for char in plain[4:] + plain[:4])) % 97 == 1
