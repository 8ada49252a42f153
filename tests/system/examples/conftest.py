"""Makes the parts of the examples importable, here and in worker ranks, which are handed our sys.path."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).parents[3] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)
