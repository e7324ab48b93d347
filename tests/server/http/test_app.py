"""A whole server as a user starts it: its first words, its doors, and how it refuses."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from offbook.server.serving import OPEN_FILES
from tests.server.servers import RunningServer, chat_body, command, until, without_engine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("app") / "dir"
    with RunningServer(folder, "--max-body", "20000", "--inference-only") as running:
        yield running


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refusal, which has OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def start(*flags: str, folder: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    return subprocess.run(command(folder, *flags), capture_output=True, text=True, timeout=60, env=env)


def test_nothing_in_the_directory_is_open_to_other_accounts(server: RunningServer) -> None:
    made = [server.folder, *server.folder.rglob("*")]
    assert (server.folder / "records.db").is_file()
    assert not [path for path in made if not path.is_socket() and path.stat().st_mode & 0o077]


# ---- starting


def test_help_is_quick_names_every_option_and_loads_no_web_framework_or_torch() -> None:
    probe = (
        "import sys, runpy\n"
        "sys.argv = ['server', '--help']\n"
        "try: runpy.run_module('offbook.server', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('LOADED', sorted({'torch', 'transformers', 'fastapi', 'sqlalchemy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert "LOADED []" in done.stdout, done.stderr
    for name in ("--model", "--api-key", "--set", "unclaimed_ttl", "parent_pid", "max_batch"):
        assert name in done.stdout
    assert "[default: 8000]" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--port", "99999"), ("--port", "65535")),
        (("--dtype", "int4"), ("--dtype", "float32", "int4")),
        (("--name", "a/b"), ("--name", "a/b")),
        (("--max-batch", "0"), ("--max-batch", "greater than or equal to 1")),
        (("--no-such-option",), ("--no-such-option",)),
        (("--model", "/no/such/folder"), ("/no/such/folder", "tiny")),
        (("--project", "logs"), ("logs",)),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_code_2(
    tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = start(*flags, folder=tmp_path)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_base_model_that_is_nowhere_names_the_folder_and_the_hub_name_that_were_tried(tmp_path: Path) -> None:
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = start("--model", "nobody/no-such-model", folder=tmp_path / "dir", env=offline)
    assert done.returncode == 2
    assert str(Path.cwd() / "nobody/no-such-model") in done.stderr
    assert "https://huggingface.co/nobody/no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_no_model_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = start("--model", str(tmp_path / "empty"), folder=tmp_path / "dir")
    assert done.returncode == 2
    assert "config.json" in done.stderr and "empty" in done.stderr


@pytest.mark.slow("more real servers")
def test_a_base_that_the_engine_cannot_load_ends_the_server_with_one_line_that_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "qwen2"}')
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    done = start("--model", str(broken), folder=tmp_path / "dir")
    assert done.returncode == 1, done.stderr
    assert f"could not be started: --model {broken}: model.safetensors is missing or cut off" in done.stderr
    assert "sampler.log" in done.stderr and "ERROR offbook.sampler" not in done.stderr
    log = (tmp_path / "dir" / "logs" / "sampler.log").read_text(encoding="utf-8")
    assert "ERROR offbook.sampler" in log.splitlines()[-1], "lines of a library's clean-up"
    assert not (tmp_path / "dir" / "server.json").exists()


def test_a_taken_port_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = start("--port", str(port), folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"offbook: port {port} on 127.0.0.1 is taken by another program; choose another --port (0 takes a free one)"
    )


def test_a_second_server_on_the_directory_is_told_pid_and_url_of_the_first(server: RunningServer) -> None:
    done = start(folder=server.folder)
    assert done.returncode == 2
    assert str(server.process.pid) in done.stderr and server.url in done.stderr
    assert "Traceback" not in done.stderr
    assert server.http.get("/health").json()["status"] == "ok"


def test_the_first_words_say_where_everything_is(server: RunningServer) -> None:
    until(lambda: "ready at" in server.output(), "the banner")
    words = server.output()
    for word in (
        server.url,
        "tiny",
        str(server.folder),
        "default (step 0)",
        str(server.folder / "logs"),
        "off (--inference-only)",
    ):
        assert word in words


def test_the_server_process_never_loads_torch(server: RunningServer) -> None:
    mapped = {Path(region.path).name for region in psutil.Process(server.process.pid).memory_maps() if region.path}
    assert not [name for name in mapped if name.startswith("libtorch")]
    sampler = {Path(region.path).name for region in server.child("inference").memory_maps() if region.path}
    assert [name for name in sampler if name.startswith("libtorch")]


# ---- doors


def test_health_says_what_runs_here(server: RunningServer) -> None:
    facts = server.http.get("/health").json()
    assert facts["base_model"] == "tiny" and facts["engine"] == "embedded" and facts["pid"] == server.process.pid


def test_it_may_open_as_many_files_as_calls_need(server: RunningServer) -> None:
    soft, hard = psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft >= min(hard if hard > 0 else OPEN_FILES, OPEN_FILES)


def test_a_foreign_host_header_is_refused_on_loopback(server: RunningServer) -> None:
    answer = server.http.get("/v1/models", headers={"host": "evil.example:8000"})
    assert "DNS rebinding" in refused(answer, 403)["message"]


def test_beyond_loopback_a_key_is_made_shown_once_and_asked_for(tmp_path: Path) -> None:
    with (
        without_engine() as flags,
        RunningServer(tmp_path / "dir", "--host", "0.0.0.0", *flags, ready=False) as running,
    ):
        until(lambda: (running.folder / "server.json").exists(), "server.json")
        running.http.base_url = httpx.URL(running.url)
        assert running.url.startswith("http://127.0.0.1:")
        key = (running.folder / "key").read_text().strip()
        assert stat.S_IMODE((running.folder / "key").stat().st_mode) == 0o600
        assert running.http.get("/health").status_code == 200
        assert refused(running.http.get("/v1/models"), 401)["code"] == "missing_api_key"
        wrong = running.http.get("/v1/models", headers={"authorization": "Bearer nope"})
        assert refused(wrong, 401)["code"] == "invalid_api_key"
        assert running.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert running.http.get("/").headers["www-authenticate"].startswith("Basic ")
        assert running.http.get("/", auth=("anyone", key)).status_code == 200
        until(lambda: "ready at" in running.output(), "the banner", 180)
        assert running.output().count(key) == 2  # the key's line and the client's line to paste
        assert f'api_key="{key}"' in running.output()


def test_the_first_page_names_the_engine_and_forbids_inline_scripts(server: RunningServer) -> None:
    page = server.http.get("/")
    assert page.status_code == 200 and "tiny on embedded" in page.text
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'") and "unsafe" not in policy


# ---- refusals


def test_a_body_that_says_it_is_too_large_is_refused_with_the_limit(server: RunningServer) -> None:
    error = refused(server.chat("x" * 30_000), 413)
    assert "20000" in error["message"] and "--max-body" in error["message"]


def test_a_body_that_turns_out_too_large_is_refused_with_the_limit(server: RunningServer) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"model": "default", "messages": "'
        for _ in range(30):
            yield b"x" * 1000

    for path in ("/v1/chat/completions", "/api/models", "/api/trajectories"):
        answer = server.http.post(path, content=pieces(), headers={"content-type": "application/json"})
        assert "20000" in refused(answer, 413)["message"]


def test_an_unknown_route_and_a_wrong_method_have_the_same_shape(server: RunningServer) -> None:
    assert "GET /v1/nothing" in refused(server.http.get("/v1/nothing"), 404)["message"]
    for path in ("/v1/chat/completions", "/t/t1/v1/chat/completions", "/api/train"):
        answer = server.http.put(path)
        refused(answer, 405)
        assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/models", {"name": "a/b", "base_model": "tiny"}, "name"),
        ("/api/models", {"name": "a", "base_model": "tiny", "lora": {"r": "many"}}, "lora.r"),
        ("/api/models", {"name": "a", "base_model": "tiny", "colour": 1}, "colour"),
        ("/api/models", {"name": "a"}, "base_model"),
        ("/api/train", {"model": "default", "groups": []}, "groups"),
        (
            "/api/train",
            {"model": "default", "groups": [{"trajectory_ids": ["t"]}], "config": {"loss": "x"}},
            "config.loss",
        ),
        ("/api/train", {"model": "default", "groups": [{"trajectory_ids": ["t"]}], "config": {"lr": 1}}, "config.lr"),
    ],
)
def test_a_wrong_field_is_named(server: RunningServer, path: str, body: dict[str, Any], field: str) -> None:
    error = refused(server.http.post(path, json=body), 400)
    assert error["param"] == field and field in error["message"]


@pytest.mark.parametrize(
    ("path", "text", "field"),
    [
        (
            "/api/trajectories",
            '{"trajectories": [{"id": "t", "model": "default", "started_at": NaN, "ended_at": 2}]}',
            "trajectories.0.started_at",
        ),
        (
            "/api/train",
            '{"model": "default", "groups": [{"trajectory_ids": ["t"]}], "config": {"max_grad_norm": Infinity}}',
            "config.max_grad_norm",
        ),
    ],
)
def test_what_json_could_not_give_back_is_refused_and_named(
    server: RunningServer, path: str, text: str, field: str
) -> None:
    headers = {"content-type": "application/json"}
    assert refused(server.http.post(path, content=text, headers=headers), 400)["param"] == field
    assert server.http.get("/api/trajectories").status_code == 200


def test_a_reward_that_is_no_number_is_refused_and_named(server: RunningServer) -> None:
    for bad in ("NaN", "Infinity", '"high"'):
        text = (
            f'{{"trajectories": [{{"id": "t", "model": "default", "reward": {bad}, "started_at": 1, "ended_at": 2}}]}}'
        )
        answer = server.http.post("/api/trajectories", content=text, headers={"content-type": "application/json"})
        assert "reward" in refused(answer, 400)["message"]


def test_a_body_that_is_no_json_is_refused(server: RunningServer) -> None:
    for path in ("/api/models", "/api/train", "/api/trajectories", "/v1/chat/completions"):
        answer = server.http.post(path, content=b"{not json", headers={"content-type": "application/json"})
        assert refused(answer, 400)["type"] == "invalid_request_error"


def test_an_unknown_model_is_a_404_that_lists_the_names(server: RunningServer) -> None:
    error = refused(server.chat(model="nobody"), 404)
    assert error["param"] == "model" and "default" in error["message"]


def test_without_a_learner_a_train_request_is_refused(server: RunningServer) -> None:
    body = {"model": "default", "groups": [{"trajectory_ids": ["t"]}]}
    assert "--inference-only" in refused(server.http.post("/api/train", json=body), 409)["message"]


# ---- ending


@pytest.mark.slow("more real servers")
def test_ctrl_c_lets_a_running_call_finish_and_ends_with_code_0(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "dir", "--inference-only") as running:
        sampler = running.child("inference")
        with running.http.stream(
            "POST", "/v1/chat/completions", json=chat_body(max_tokens=120, stream=True, ignore_eos=True, min_tokens=100)
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.interrupt()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert running.process.wait(30) == 0
        until(lambda: not sampler.is_running(), "the sampler has ended")
        assert "Ended." in running.output() and "Traceback" not in running.output()
        assert not (running.folder / "server.json").exists()


@pytest.mark.slow("more real servers")
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "dir", "--inference-only") as running, ThreadPoolExecutor() as threads:
        sampler = running.child("inference")
        sampler.suspend()  # so that the call cannot finish
        call = threads.submit(running.chat)
        until(lambda: psutil.Process(running.process.pid).net_connections(kind="tcp"), "the call has arrived")
        running.interrupt()
        until(lambda: "Ending:" in running.output(), "the first Ctrl-C is noticed")
        assert running.process.poll() is None
        running.interrupt()
        assert running.process.wait(5) == 130
        until(lambda: not sampler.is_running() or sampler.status() == psutil.STATUS_ZOMBIE, "the sampler has ended")
        assert isinstance(call.exception(10), httpx.HTTPError)


@pytest.mark.slow("more real servers")
def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent,
        RunningServer(tmp_path / "dir", "--inference-only", "--parent-pid", str(parent.pid)) as running,
    ):
        sampler = running.child("inference")
        parent.kill()
        until(lambda: running.process.poll() is not None, "the server has ended", 20)
        until(lambda: not sampler.is_running(), "the sampler has ended", 20)
