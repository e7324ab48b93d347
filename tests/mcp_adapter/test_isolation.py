"""Which rollouts share a server, what each has for itself, and that nothing leaks from one to the next."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbook.base.errors import ConfigError
from offbook_mcp import RolloutTools, ServerPool, Target
from offbook_mcp.connection.servers import ROLLOUT_DIR
from tests.mcp_adapter.conftest import SERVERS, children, misbehaving, python_module
from tests.mcp_adapter.servers import notes_server


async def answer(tools: RolloutTools, name: str, /, **arguments: object) -> str:
    result = await tools.call(name, arguments)
    assert not result.is_error, result.text
    return result.text


async def test_a_server_that_only_reads_is_shared_by_all_rollouts() -> None:
    async with ServerPool(Target.parse(python_module("mcp_server_time", "--local-timezone", "UTC"))) as pool:
        assert pool.shared == ("mcp_server_time",)
        assert [tool.name for tool in pool.toolset.tools] == ["get_current_time", "convert_time"]

        async def rollout() -> str:
            async with pool.rollout() as tools:
                return await answer(
                    tools,
                    "convert_time",
                    source_timezone="Asia/Tokyo",
                    time="16:30",
                    target_timezone="Asia/Kolkata",
                )

        answers = await asyncio.gather(*(rollout() for _ in range(12)))
        assert {json.loads(each)["time_difference"] for each in answers} == {"-3.5h"}
        assert len(children()) == 1
    assert children() == set()


@pytest.mark.parametrize(
    "target", ["{outside}", "../../outside/file", "{fixture}/own", "../up/../../outside", "{outside}/new"]
)
async def test_a_link_that_leads_out_of_the_fixture_is_refused(tmp_path: Path, target: str) -> None:
    fixture, outside = tmp_path / "fixture", tmp_path / "outside"
    for folder in (fixture / "sub", outside):
        folder.mkdir(parents=True)
    (outside / "file").write_text("the user's")
    (fixture / "own").write_text("own")
    (fixture / "up").symlink_to("sub")
    (fixture / "sub" / "link").symlink_to(target.format(outside=outside, fixture=fixture))
    with pytest.raises(ConfigError, match=r"fixture: the link .*sub/link' leads to .*: replace it"):
        async with ServerPool(Target.parse(notes_server.make, fixture=fixture)):
            pass
    assert [path.name for path in outside.iterdir()] == ["file"]


async def test_a_link_inside_the_fixture_is_a_link_inside_each_copy(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("own")
    (tmp_path / "link").symlink_to("own")
    async with (
        ServerPool(Target.parse(notes_server.make, fixture=tmp_path, allow_all=True)) as pool,
        pool.rollout() as tools,
    ):
        assert tools.folder is not None
        (tools.folder / "link").write_text("changed")
        assert (tools.folder / "own").read_text() == "changed"
    assert (tmp_path / "own").read_text() == "own"


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_each_rollout_has_a_copy_of_the_repository(repository: Path) -> None:
    target = Target.parse(
        python_module("mcp_server_git", "--repository", ROLLOUT_DIR),
        fixture=repository,
        bind={"repo_path": ROLLOUT_DIR},
        only=("git_log", "git_status", "git_create_branch", "git_branch"),
        allow=("git_create_branch",),
    )
    async with ServerPool(target, max_rollouts=2, ahead=1) as pool:
        assert pool.shared == ()
        assert "repo_path" not in str(pool.toolset.functions())
        async with pool.rollout() as one, pool.rollout() as two:
            await answer(one, "git_create_branch", branch_name="teal")
            assert "teal" in await answer(one, "git_branch", branch_type="local")
            assert "teal" not in await answer(two, "git_branch", branch_type="local")
            assert one.neutral(await answer(one, "git_log")) == two.neutral(await answer(two, "git_log"))
            assert one.neutral(f"see {one.folder}/a") == "see {rollout_dir}/a"
            folders = [one.folder, two.folder]
        async with pool.rollout() as three:
            assert "teal" not in await answer(three, "git_branch", branch_type="local")
    assert not any(folder.exists() for folder in folders if folder)
    assert not (repository / ".git" / "refs" / "heads" / "teal").exists()


async def test_one_process_serves_rollouts_that_differ_by_a_bound_folder(repository: Path) -> None:
    target = Target.parse(
        python_module("mcp_server_git"),
        fixture=repository,
        bind={"repo_path": ROLLOUT_DIR},
        stateless=True,
        allow_all=True,
    )
    async with ServerPool(target) as pool, pool.rollout() as one, pool.rollout() as two:
        assert len(children()) == 1
        await answer(one, "git_create_branch", branch_name="ochre")
        assert "ochre" in await answer(one, "git_branch", branch_type="local")
        assert "ochre" not in await answer(two, "git_branch", branch_type="local")


async def test_the_memory_server_remembers_nothing_from_rollout_to_rollout(node_server: Callable[[str], str]) -> None:
    target = Target.parse(f"MEMORY_FILE_PATH={ROLLOUT_DIR}/memory.json {node_server('memory')}", allow_all=True)
    entities = [{"name": f"e{n}", "entityType": "t", "observations": []} for n in range(8)]
    async with ServerPool(target) as pool:
        async with pool.rollout() as tools:  # at once: the server alone would lose seven of them
            await asyncio.gather(*(answer(tools, "create_entities", entities=[each]) for each in entities))
            assert json.loads(await answer(tools, "read_graph"))["entities"] == entities
        async with pool.rollout() as tools:
            assert json.loads(await answer(tools, "read_graph"))["entities"] == []


async def test_the_filesystem_server_has_a_folder_of_the_rollouts_own(
    node_server: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("teal\n")
    target = Target.parse(f"{node_server('filesystem')} {ROLLOUT_DIR}", fixture=tmp_path, allow_all=True)
    async with ServerPool(target) as pool:
        async with pool.rollout() as tools:
            assert await answer(tools, "read_text_file", path="a.txt") == "teal\n"
            await answer(tools, "write_file", path="a.txt", content="ochre")
            outside = await tools.call("read_text_file", {"path": "/etc/hostname"})
            assert outside.is_error and "Access denied" in outside.text
        async with pool.rollout() as tools:
            assert await answer(tools, "read_text_file", path="a.txt") == "teal\n"
    assert (tmp_path / "a.txt").read_text() == "teal\n"


async def test_everything_has_images_and_structured_content(node_server: Callable[[str], str]) -> None:
    target = Target.parse(node_server("everything"), allow_all=True)
    async with ServerPool(target) as pool, pool.rollout() as tools:
        assert pool.toolset.left_out["simulate-research-query"] == "it can only run as a task"
        assert await answer(tools, "get-sum", a=2, b=3) == "The sum of 2 and 3 is 5."
        image = await answer(tools, "get-tiny-image")
        assert "[image not shown (image/png, " in image and "The image above is the MCP logo." in image
        assert (await answer(tools, "get-structured-content", location="Chicago")).startswith('{"temperature": ')


async def test_a_server_object_has_a_state_for_each_rollout_when_a_function_makes_it(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("teal")
    async with ServerPool(Target.parse(notes_server.make, fixture=tmp_path, allow_all=True)) as pool:
        async with pool.rollout() as tools:
            await answer(tools, "write_note", name="new", text="ochre")
            assert json.loads(await answer(tools, "list_notes")) == ["new", "old"]
        async with pool.rollout() as tools:
            assert await answer(tools, "list_notes") == '["old"]'


async def test_rollouts_wait_for_a_slot_and_processes_are_bounded() -> None:
    running = most = 0

    async def rollout(pool: ServerPool) -> None:
        nonlocal running, most
        async with pool.rollout() as tools:
            running += 1
            most = max(most, running)
            await answer(tools, "echo", text="a")
            await asyncio.sleep(0.2)
            assert len(children()) <= 3 + 2
            running -= 1

    async with ServerPool(misbehaving("well"), max_rollouts=3, ahead=2) as pool:
        await asyncio.gather(*(rollout(pool) for _ in range(12)))
    assert most == 3


async def test_calls_of_one_rollout_to_a_server_that_writes_run_one_after_the_other() -> None:
    server = notes_server.make()
    at_once = most = 0

    @server.tool()
    async def slow(text: str) -> str:
        """Takes a while."""
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.02)
        at_once -= 1
        return text

    async with ServerPool(Target.parse(server, allow_all=True)) as pool, pool.rollout() as tools:
        answers = await asyncio.gather(*(answer(tools, "slow", text=str(n)) for n in range(5)))
        assert (answers, most) == ([str(n) for n in range(5)], 1)
    async with (
        ServerPool(Target.parse(server, stateless=True, allow_all=True)) as pool,
        pool.rollout() as one,
        pool.rollout() as two,
    ):
        await asyncio.gather(*(answer(tools, "slow", text="a") for tools in (one, two)))
        assert most == 2  # other rollouts are not held up


async def test_isolation_can_be_asked_for_and_sharing_has_to_be_possible() -> None:
    async with ServerPool(Target.parse(python_module("mcp_server_time"), stateless=False)) as pool:
        assert pool.shared == ()
    for options in ({"max_rollouts": 0}, {"ahead": -1}):
        with pytest.raises(ConfigError, match="max_rollouts, ahead: at least 1 and 0 are needed"):
            ServerPool(misbehaving("well"), **options)


async def test_a_command_sees_few_variables_and_those_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-servers")
    command = shlex.join([sys.executable, "-I", "-S", str(SERVERS / "misbehaving.py"), "environment"])
    async with (
        ServerPool(Target.parse(command, env={"CITY": "Delft"}, allow_all=True)) as pool,
        pool.rollout() as tools,
    ):
        seen = json.loads(await answer(tools, "goad"))
    assert seen["CITY"] == "Delft" and "PATH" in seen and "OPENAI_API_KEY" not in seen
