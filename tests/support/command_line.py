"""Commands of megackpt, run within the process of a test."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megackpt.cli import main


class CommandLine:
    """Runs commands and compares their exit codes; arguments may be paths or other values."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: object, code: int | None = 0) -> tuple[str, str]:
        """Return what the command prints on stdout, and on stderr; with code None at any exit code."""
        self._capsys.readouterr()
        result = main([str(argument) for argument in arguments])
        out, err = self._capsys.readouterr()
        assert code in (result, None), (arguments, result, err)
        return out, err

    def out(self, *arguments: object, code: int | None = 0) -> str:
        """Return what the command prints on stdout."""
        return self.run(*arguments, code=code)[0]

    def err(self, *arguments: object, code: int) -> str:
        """Return what the command prints on stderr, where lines may be wrapped anywhere, as one line."""
        return " ".join(self.run(*arguments, code=code)[1].split())

    def json(self, *arguments: object, code: int | None = 0) -> Any:
        """Return the document that the command prints with `--json`."""
        return json.loads(self.out(*arguments, "--json", code=code))
