"""Where the peers live: this environment, and a second one for packages that conflict with it.

`python tests/system/interop/environments.py` makes that one, in build/peers (or MEGACKPT_PEERS): a virtual
environment with Megatron-Core 0.12, zarr 2 and what they need, which finds torch in this environment.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = "here"
OLD = "megatron-core-0.12"

# numpy 1: Megatron-Core 0.12 calls numpy.product. Installed without dependencies: torch is that of this
# environment.
OLD_PACKAGES = [
    "megatron-core==0.12.3",
    "zarr==2.18.7",
    "numcodecs==0.15.2",
    "numpy==1.26.4",
    "tensorstore==0.1.86",
    "ml_dtypes==0.6.0",
    "asciitree",
    "fasteners",
    "deprecated",
    "wrapt",
    "psutil",
]


def folder() -> Path:
    return Path(os.environ.get("MEGACKPT_PEERS", ROOT / "build" / "peers"))


def python_of(name: str) -> str | None:
    """Return the Python of an environment; None where it has not been made."""
    if name == HERE:
        return sys.executable
    python = folder() / name / "bin" / "python"
    return str(python) if python.exists() else None


def lacks(name: str, *modules: str) -> str:
    """Say what is missing for a peer; "" if nothing is."""
    if python_of(name) is None:
        return f"no environment {name}: run python tests/system/interop/environments.py"
    if name == HERE:
        missing = [m for m in modules if importlib.util.find_spec(m) is None]
        return f"not installed: {', '.join(missing)}" if missing else ""
    return ""


def make_old() -> Path:
    location = folder() / OLD
    venv.create(location, with_pip=True)
    python = location / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *OLD_PACKAGES], check=True)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = location / "lib" / version / "site-packages"
    (site / "zz_tested_from.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return location


if __name__ == "__main__":
    print(make_old())
