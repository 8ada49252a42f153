"""A process that is killed while it exports leaves no half model; the next one makes an equal folder."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import FaultyStore
from tests.support.effort import few
from tests.support.huggingface_folders import saved_model
from tests.training.models.test_huggingface_restart import (
    BUFFER_BYTES,
    FILE_BYTES,
    LLAMA,
    assert_listed_files_are_whole,
    export,
)

_KILLED = """
import os, sys
import megackpt
from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import FaultyStore
source, target, count, file_bytes, buffer_bytes = sys.argv[1:]
store = FaultyStore(LocalStore(target), fail_at=int(count), hook=lambda operation: os._exit(9))
megackpt.export_huggingface(
    source, store, max_file_bytes=int(file_bytes), buffer_bytes=int(buffer_bytes), workers=2
)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_killed_process_leaves_no_half_model(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved", LLAMA, 2)
    counted = FaultyStore(LocalStore(str(tmp_path / "whole")))
    export(tmp_path / "saved", counted, workers=2)
    whole = contents(tmp_path / "whole")
    chance = random.Random(0)
    for number, count in enumerate(chance.sample(range(len(counted.operations)), few(3, of=20))):
        target = tmp_path / f"folder{number}"
        arguments = [str(tmp_path / "saved"), str(target), str(count), str(FILE_BYTES), str(BUFFER_BYTES)]
        process = subprocess.run([sys.executable, "-c", _KILLED, *arguments], check=False, timeout=120)
        assert process.returncode == 9
        if target.exists():
            assert_listed_files_are_whole(contents(target), whole)
        export(tmp_path / "saved", target)
        assert contents(target) == whole, count
