"""`megackpt init` writes scripts and replaces none; tests/system/examples/test_init_scripts.py runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megackpt.cli.init import SCRIPTS
from tests.support.command_line import CommandLine


@pytest.mark.parametrize("kind", sorted(SCRIPTS))
def test_a_script_is_short_and_compiles_and_replaces_no_file(
    kind: str, tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.run("init", kind)
    text = (tmp_path / f"train_{kind}.py").read_text()
    compile(text, kind, "exec")
    assert len(text.splitlines()) < 90
    assert f"train_{kind}.py run 100" in text
    (tmp_path / f"train_{kind}.py").write_text("mine")
    assert "exists, and is not changed" in cli.err("init", kind, code=2)
    assert (tmp_path / f"train_{kind}.py").read_text() == "mine"
