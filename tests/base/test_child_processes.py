"""The last lines of a dead process are its exception.

Triton, torch and faulthandler wrote these outputs; lines of c10d, the resource tracker and an ignored exception are by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offbook.base.child_processes import last_line, last_lines
from offbook.server.child_process import Child

TRITON = """\
Traceback (most recent call last):
  File "/srv/die.py", line 8, in <module>
    step(1)
  File "/srv/die.py", line 7, in step
    def step(batch): return batch + None
                            ~~~~~~^~~~~~
TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'
nanobind: leaked 1 instances!
 - leaked instance 0x556081566e60 of type "triton._C.libtriton.ir.context"
nanobind: leaked 38 types!
 - leaked type "triton._C.libtriton.ir.location"
 - leaked type "triton._C.libtriton.ir.source_mgr_diag"
 - ... skipped remainder
nanobind: leaked 300 functions!
 - leaked function "create_si_to_fp"
 - ... skipped remainder
nanobind: this is likely caused by a reference counting issue in the binding code.
See https://nanobind.readthedocs.io/en/latest/refleaks.html
"""
TORCH = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/srv/die2.py", line 5, in <module>
[rank0]:     raise RuntimeError(message)
[rank0]: RuntimeError: the weights do not fit
[rank0]: Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
[rank0]:[W1129 08:49:51.000000000 ProcessGroupNCCL.cpp:1553] Warning: WARNING: destroy_process_group() was not called before program exit
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked shared_memory objects to clean up at shutdown
"""
FAULT = """\
loading
Fatal Python error: Segmentation fault

Current thread 0x00007ff46b73cb80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/srv/die3.py", line 1 in <module>

Extension modules: numpy._core._multiarray_umath, numpy.linalg._umath_linalg (total: 2)
"""
IGNORED = """\
Traceback (most recent call last):
  File "/srv/die.py", line 3, in <module>
    main()
ValueError: --base: no such folder
Exception ignored in: <function Engine.__del__ at 0x7f2f3c5e0d60>
Traceback (most recent call last):
  File "/srv/engine.py", line 9, in __del__
    self.stop()
AttributeError: 'Engine' object has no attribute 'stop'
"""


@pytest.mark.parametrize(
    ("output", "exception", "last"),
    [
        (TRITON, "TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'", "TypeError: unsupported"),
        (TORCH, "[rank0]: RuntimeError: the weights do not fit", "[rank0]: Compile with"),
        (FAULT, "Fatal Python error: Segmentation fault", '  File "/srv/die3.py"'),
        (IGNORED, "ValueError: --base: no such folder", "ValueError: --base"),
        ("one\ntwo\n\n", "two", "two"),
    ],
    ids=["nanobind", "torch", "faulthandler", "ignored in a destructor", "no exception"],
)
def test_the_last_words_of_a_process_are_its_exception(output: str, exception: str, last: str) -> None:
    assert last_line(output) == exception
    assert last_lines(output, 15)[-1].startswith(last) and exception in last_lines(output, 15)


def test_an_exception_before_many_lines_of_unknown_noise_is_shown_first() -> None:
    noise = [f"leaking {number}" for number in range(40)]
    shown = last_lines("\n".join(["Traceback (most recent call last):", '  File "x"', "OSError: gone", *noise]), 15)
    assert len(shown) == 15 and shown[0] == "OSError: gone" and shown[-1] == "leaking 39"


async def test_a_childs_log_ends_with_its_exception_whatever_its_libraries_write_at_exit(tmp_path: Path) -> None:
    noise = TRITON[TRITON.index("nanobind") :]
    code = f"import atexit, sys; atexit.register(sys.stderr.write, {noise!r}); 1 + None"
    child = await Child.start([sys.executable, "-c", code], tmp_path / "log")
    await child.exited.wait()
    assert child.log.tail(1) == "TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'"
    assert "nanobind" not in child.log.tail() and "skipped remainder" in (tmp_path / "log").read_text()
