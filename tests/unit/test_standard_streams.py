from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from torchweft import standard_streams

CHECK = """
import os, sys
for each in {closed}:
    os.close(each)
{before}
from torchweft import standard_streams
standard_streams.{call}()
kinds = [os.path.samestat(os.fstat(each), os.stat(os.devnull)) for each in (0, 1, 2)]
inherited = [os.get_inheritable(each) for each in {closed}]
lacking = [each for each in ("stdin", "stdout", "stderr") if getattr(sys, each) is None]
with open(sys.argv[1], "w") as file:
    print(file.fileno(), kinds, all(inherited), lacking, file=file)
"""


@pytest.mark.parametrize("call", ["reserve_descriptors", "open_missing"])
@pytest.mark.parametrize("closed", [(), (1,), (0, 2), (0, 1, 2)])
def test_no_file_gets_the_number_of_a_standard_stream(
    tmp_path: object, closed: tuple[int, ...], call: str
) -> None:
    path = os.path.join(str(tmp_path), "found")
    lacking = [("stdin", "stdout", "stderr")[each] for each in closed]
    before = "\n".join(f"sys.{each} = None" for each in lacking)
    code = CHECK.format(closed=closed, call=call, before=before)
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, **_pipes()):
        pass
    with open(path) as file:
        number, told = file.read().split(maxsplit=1)
    assert int(number) > 2
    kinds = [each in closed for each in (0, 1, 2)]
    assert told.strip() == f"{kinds} True {[] if call == 'open_missing' else lacking}"


def _pipes() -> dict[str, int]:
    return {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.mark.parametrize("stream", [None, object(), io.StringIO("closed")])
def test_what_cannot_be_flushed_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    if isinstance(stream, io.StringIO):
        stream.close()
    kept = io.TextIOWrapper(io.BytesIO(), write_through=False)
    kept.write("kept")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", kept)
    standard_streams.flush()
    standard_streams.drop_output()
    assert kept.buffer.getvalue() == b"kept"  # type: ignore[attr-defined]
