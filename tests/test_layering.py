"""Who may import whom: downwards only. Imports in functions and under TYPE_CHECKING count."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import megackpt

ROOT = Path(__file__).parents[1]

# A part of the package, and the parts that it may import besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "notices": set(),
    "entry_points": {"notices"},
    "read_checkpoint": set(),
    "arguments": {"errors"},
    "options": {"arguments", "errors"},
    "geometry": {"errors"},
    "metadata": {"geometry", "errors"},
    "mapping": {"metadata", "geometry", "errors"},
    "planning": {"metadata", "geometry", "errors", "options"},
    # Maps between families of names: rules and their proofs, and requests in another family's names.
    "maps": {"mapping", "geometry", "entry_points", "errors"},
    "validation": {"planning", "metadata", "geometry", "notices", "errors", "options"},
    "codec": {"errors"},
    "comm": {"errors"},
    "storage": {"arguments", "errors"},
    "formats": {
        "planning", "metadata", "mapping", "geometry", "codec", "storage", "options", "entry_points",
        "notices", "errors",
    },
    "engine": {
        "formats", "validation", "planning", "maps", "mapping", "metadata", "geometry", "codec", "comm",
        "storage", "options", "notices", "errors",
    },
    # Public functions on whole checkpoints; the command line prints what they return.
    "maintenance": {
        "engine", "formats", "validation", "planning", "mapping", "maps", "metadata", "geometry", "codec",
        "comm", "storage", "options", "arguments", "notices", "errors",
    },
    "api": {
        "engine", "formats", "validation", "maps", "mapping", "metadata", "comm", "storage", "options",
        "arguments", "errors",
    },
    "config": {"formats", "validation", "options", "arguments", "errors"},
    "checkpointer": {
        "api", "engine", "formats", "planning", "validation", "storage", "mapping", "maps", "comm", "options",
        "arguments", "notices", "errors",
    },
    "parallel": {"mapping", "geometry", "comm", "errors"},
    "optim": {"parallel", "mapping", "geometry", "comm", "errors"},
    "training_state": {"parallel", "mapping", "geometry", "comm", "errors"},
    # Other libraries' names over our core: at the rim.
    "compat": {
        "api", "engine", "formats", "validation", "mapping", "metadata", "codec", "optim", "comm", "storage",
        "options", "errors",
    },
    # Other libraries' tensors and interfaces, likewise. DCP's protocols stand over planning and engine:
    # DCP brings the ranks together itself, where `api` would.
    "integrations": {
