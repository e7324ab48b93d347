"""LangChain's standard suite for chat models, the part that makes no calls."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from offbook_langgraph import ChatOffbook


@pytest.fixture(autouse=True)
def known_to_langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_serdes` loads with allowed_objects="all": every class in langchain-core's own table, which has LangChain's
    partner packages. Users name the class instead: allowed_objects=[ChatOffbook]."""
    loading = importlib.import_module("langchain_core.load.load")  # the package's attribute is the function
    path = tuple(ChatOffbook.lc_id())
    monkeypatch.setitem(loading.ALL_SERIALIZABLE_MAPPINGS, path, path)
    monkeypatch.setattr(loading, "_default_class_paths_cache", {})


class TestChatOffbookUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatOffbook]:
        return ChatOffbook

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "email-agent", "base_url": "http://gpu-box:8000/v1"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        """The environment's server and key are Offbook's; OpenAI's go to nobody else."""
        environment = {
            "OFFBOOK_URL": "http://gpu-box:8000",
            "OFFBOOK_API_KEY": "ours",
            "OPENAI_API_KEY": "openai's",
            "OPENAI_API_BASE": "https://api.openai.com/v1",
        }
        expected = {"openai_api_key": "ours", "openai_api_base": "http://gpu-box:8000/v1"}
        return environment, {"model": "email-agent"}, expected
