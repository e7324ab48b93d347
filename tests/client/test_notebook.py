"""A notebook on a real server, each of its cells run twice."""

from __future__ import annotations

import warnings
from pathlib import Path

import nbclient
import nbformat
import pytest

CELLS = [
    """
import offbook
backend = offbook.LocalBackend(DIR, threads=1)
model = offbook.TrainableModel("notebook", base_model="tiny")
await model.register(backend)
""",
    """
async def rollout(reward):
    client = model.openai_client()
    trajectory = offbook.Trajectory(messages_and_choices=[{"role": "user", "content": f"say hello to {reward}"}], reward=reward)
    answer = await client.chat.completions.create(model=model.name, messages=trajectory.messages(), max_tokens=4)
    trajectory.messages_and_choices.append(answer.choices[0])
    return trajectory

groups = await offbook.gather_trajectory_groups([offbook.TrajectoryGroup(rollout(i % 2) for i in range(2))])
result = await model.train(groups)
print("step", result.step)
""",
]


@pytest.mark.slow("more real servers")
def test_a_notebook_trains_and_its_cells_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    sources = [source.replace("DIR", repr(str(tmp_path / "dir"))) for source in CELLS for _ in range(2)]
    cells = [nbformat.v4.new_code_cell(source) for source in [*sources, "backend.close()"]]
    book = nbformat.v4.new_notebook(cells=cells)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own, of its messaging sockets
        done = nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    printed = [output["text"] for cell in done.cells for output in cell.outputs if output.get("name") == "stdout"]
    assert printed == ["step 1\n", "step 2\n"]
    assert not (tmp_path / "dir" / "server.json").exists()
