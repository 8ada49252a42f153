"""Which package of the name `apex` is installed: NVIDIA's, or the other project on the package index."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from typing import Literal


def installed_apex() -> Literal["nvidia", "other"] | None:
    """Return whose `apex` an import would find; nothing is imported. Local.

    The package of that name on the package index is another project, without optimizers. NVIDIA's is built
    from its repository.
    """
    spec = importlib.machinery.PathFinder.find_spec("apex", sys.path)
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    is_nvidias = any((folder / "multi_tensor_apply").is_dir() for folder in folders)
    return "nvidia" if is_nvidias else "other"


def installation_note() -> str:
    """Return a sentence for errors if the installed `apex` is another project, else an empty text. Local."""
    if installed_apex() != "other":
        return ""
    return (
        " The package 'apex' that is installed is not NVIDIA's but another project of that name on the "
        "package index: uninstall it, and build NVIDIA's from https://github.com/NVIDIA/apex."
    )
