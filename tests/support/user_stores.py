"""Stores as a user might write them, in a module that the writer process can import."""

from __future__ import annotations

import os

from megackpt.storage import LocalStore, Store


class NamedStore(LocalStore):
    """A directory under a name, which a pickle carries."""

    def __init__(self, directory: str | os.PathLike[str], name: str) -> None:
        super().__init__(directory)
        self.name = name

    def __reduce__(self) -> tuple[type[NamedStore], tuple[str, str]]:
        return NamedStore, (super().location, self.name)

    @property
    def location(self) -> str:
        """What messages call it."""
        return f"named:{self.name}"


class KeepsNothing(LocalStore):
    """A store whose copy in another process writes to another directory, as a store in memory would."""

    def __reduce__(self) -> tuple[type[LocalStore], tuple[str]]:
        return LocalStore, (f"{self.location}-elsewhere",)


class RequiredMethodsOnly:
    """A store that does not derive from `Store` and has its abstract methods, and nothing else."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        files = LocalStore(directory)
        for name in Store.__abstractmethods__:
            setattr(self, name, getattr(files, name))
