"""Sorts the mail of a firm: which desk answers it? It knows nothing of Offbook."""

from __future__ import annotations

from openai import AsyncOpenAI

DESKS = ("sales", "repair", "payroll")


async def sort(client: AsyncOpenAI, model: str, mail: dict[str, str]) -> float:
    """1 if the model names the right desk for `mail["subject"]`, else 0."""
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Which desk answers this? {mail['subject']}"}],
        extra_body={"structured_outputs": {"choice": list(DESKS)}},
    )
    return float(answer.choices[0].message.content == mail["desk"])
