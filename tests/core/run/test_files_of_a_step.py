"""What is listed below the directory of a step: names, sizes and times; None where there is no directory."""

from __future__ import annotations

import os
from pathlib import Path

from megackpt.engine.checkpoint.step_roots import step_directories
from megackpt.engine.checkpoint.steps import StepFile
from megackpt.storage import MemoryStore


def test_all_files_of_a_step_are_listed_those_in_directories_too(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001" / "data").mkdir(parents=True)
    for name, nbytes, time_s in (("top", 3, 50.0), ("data/0", 7, 60.0)):
        path = tmp_path / "iter_0000001" / name
        path.write_bytes(b"x" * nbytes)
        os.utime(path, (time_s, time_s))
    (tmp_path / "iter_0000002").mkdir()
    steps = step_directories(tmp_path, objects=None)
    files = steps.files("iter_0000001")
    assert files is not None
    assert sorted(files, key=lambda file: file.name) == [
        StepFile(name="data/0", nbytes=7, modified_s=60.0),
        StepFile(name="top", nbytes=3, modified_s=50.0),
    ]
    assert steps.files("iter_0000002") == []
    assert steps.files("iter_0000003") is None


def test_files_of_a_step_in_a_store_without_directories_have_names_below_it() -> None:
    store = MemoryStore()
    store.write("iter_0000001/data/0", b"1234567")
    store.write("iter_0000002/top", b"123")
    steps = step_directories(store, objects=None)
    files = steps.files("iter_0000001")
    assert files is not None
    assert [(file.name, file.nbytes) for file in files] == [("data/0", 7)]
    assert not steps.files("iter_0000003")
