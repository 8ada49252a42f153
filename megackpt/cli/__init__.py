"""The command line: `megackpt COMMAND`, or `python -m megackpt.cli` where torchrun wants a module."""

from megackpt.cli.entry import main

__all__ = ["main"]
