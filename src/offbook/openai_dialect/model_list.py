"""The list of models, `GET /v1/models`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """A model name that calls may use. `created` is 0 where names appear and disappear."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "offbook"


class ModelCards(BaseModel):
    """The list of model names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
