"""`import offbook`: exact names, and nothing loaded before it is used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import offbook
import offbook.testing as kit
from tests.paths import ROOT

NAMES = [
    "Command",
    "EngineOptions",
    "History",
    "LocalBackend",
    "LoraOptions",
    "Model",
    "OffbookError",
    "RemoteBackend",
    "RewardResult",
    "Ruler",
    "SFTConfig",
    "Scenario",
    "TeacherKL",
    "TraceSink",
    "TrainConfig",
    "TrainResult",
    "TrainableModel",
    "Trainer",
    "Trajectory",
    "TrajectoryGroup",
    "auto_trajectory",
    "capture_auto_trajectory",
    "current_trajectory",
    "gather_trajectories",
    "gather_trajectory_groups",
    "iterate_dataset",
    "log_metric",
    "log_reward",
    "outside",
    "ruler",
    "ruler_score_group",
    "trajectory_group_batches",
    "write_rubric",
]
KIT = [
    "Action",
    "LlmReply",
    "LlmRequest",
    "PolicySampler",
    "ScriptedLlm",
    "ScriptedServer",
    "ShownConversation",
    "attempts_shown",
    "calls_tool",
    "check_sink",
    "chooses_nothing",
    "cuts",
    "fails",
    "filters",
    "hangs",
    "judges",
    "refuses",
    "resets",
    "sample_events",
    "sample_rollout",
    "says",
    "scripted_llm",
    "scripted_server",
    "sends",
]
HEAVY = ["torch", "transformers", "langgraph", "langchain", "langchain_core", "mcp", "litellm", "langfuse"]


def in_fresh_process(code: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_the_public_names_are_exactly_these_and_sorted_and_each_can_be_loaded() -> None:
    assert offbook.__all__ == NAMES == sorted(NAMES)
    assert all(getattr(offbook, name).__name__ == name for name in NAMES)
    assert set(NAMES) | {"__version__"} == set(dir(offbook))


def test_importing_offbook_loads_nothing_else_and_takes_well_under_a_second() -> None:
    code = (
        "import sys, time, json; before = set(sys.modules); start = time.process_time(); import offbook; "
        "seconds = time.process_time() - start; loaded = sorted({n.split('.')[0] for n in set(sys.modules) - before});"
        "print(json.dumps({'seconds': seconds, 'loaded': loaded, 'own': sorted(n for n in sys.modules if n.startswith('offbook'))}))"
    )
    found = in_fresh_process(code)
    assert found["own"] == ["offbook"]
    assert not set([*HEAVY, "openai", "pydantic", "httpx", "rich", "numpy"]) & set(found["loaded"])
    assert found["seconds"] < 0.3


def test_using_every_public_name_loads_no_engine_and_no_framework() -> None:
    code = (
        "import sys, json, offbook; [getattr(offbook, name) for name in offbook.__all__]; "
        "print(json.dumps({'loaded': sorted(sys.modules)}))"
    )
    loaded = {name.split(".")[0] for name in in_fresh_process(code)["loaded"]}
    assert not set(HEAVY) & loaded


def test_the_names_of_the_test_kit_are_exactly_these_and_sorted_and_each_is_documented() -> None:
    assert kit.__all__ == KIT == sorted(KIT) == dir(kit)
    assert all(getattr(kit, name).__name__ == name for name in KIT)
    assert [name for name in KIT if getattr(kit, name).__doc__.startswith(f"{name}(")] == []  # a dataclass without any


def test_importing_the_test_kit_loads_nothing_and_a_scripted_llm_needs_no_server() -> None:
    code = (
        "import sys, json, offbook.testing as kit; before = [name for name in sys.modules if name.startswith('offbook.')];"
        "kit.scripted_llm, kit.says, kit.check_sink, kit.judges; print(json.dumps({'before': before, 'loaded': sorted(sys.modules)}))"
    )
    found = in_fresh_process(code)
    assert sorted(found["before"]) == ["offbook.base", "offbook.base.errors", "offbook.testing"]
    loaded = {name.split(".")[0] for name in found["loaded"]}
    assert not {*HEAVY, "pytest", "_pytest", "uvicorn", "fastapi", "sqlalchemy"} & loaded
    assert not [name for name in found["loaded"] if name.startswith("offbook.server")]


def test_using_every_name_of_the_test_kit_loads_no_engine_no_framework_and_no_pytest() -> None:
    code = (
        "import sys, json, offbook.testing as kit; [getattr(kit, name) for name in kit.__all__]; "
        "print(json.dumps({'loaded': sorted(sys.modules)}))"
    )
    assert not {*HEAVY, "pytest", "_pytest"} & {name.split(".")[0] for name in in_fresh_process(code)["loaded"]}


def test_a_name_of_the_test_kit_that_needs_an_extra_says_which() -> None:
    code = (
        "import sys, json; sys.modules['uvicorn'] = None; import offbook.testing as kit\n"
        "try: kit.scripted_server\n"
        "except ImportError as error: print(json.dumps({'error': f'{type(error).__name__}: {error}'}))"
    )
    error = in_fresh_process(code)["error"]
    assert error.startswith("MissingExtraError: uvicorn is not installed: pip install") and "[server]" in error


def test_the_projects_former_name_is_nowhere() -> None:
    """Another distribution on PyPI has that name, import and command."""
    former = re.compile(b"under" + b"study", re.IGNORECASE)
    skipped = {"build", "node_modules", "__pycache__"}
    files = [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part in skipped or part.startswith(".") for part in path.relative_to(ROOT).parts[:-1])
    ]
    assert len(files) > 500
    named = [path for path in files if former.search(path.name.encode()) or former.search(path.read_bytes())]
    assert [str(path.relative_to(ROOT)) for path in named] == []
