"""Starts a writer process: a new interpreter that does not trust the current directory.

Training is often started in a directory that others can write to. So a module in that directory never takes
the place of one of the standard library or of an installed package.
"""

from __future__ import annotations

import json
import os
import site
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from megackpt.engine.background.child_process import ChildProcess

# A writer process must take no memory of a device. It has one thread for arithmetic, since the processors are
# for the training.
_QUIET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}

# In isolated mode Python imports nothing from the current directory or PYTHONPATH. This package is the one
# that the parent has, wherever that is; all other modules are found by the parent's search path.
_BOOTSTRAP = """
import json, site, sys
from importlib.util import module_from_spec, spec_from_file_location
settings = json.loads(sys.argv[1])
if settings["user_site"]:
    site.addsitedir(settings["user_site"])
sys.path[:] = settings["search"]
package = settings["package"]
spec = spec_from_file_location("megackpt", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["megackpt"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["megackpt"])
from megackpt.engine.background.writer_main import main
main(settings)
"""


def start_writer(kind: tuple[int, str | None, str | None], memory: int) -> ChildProcess:
    """Start the process. It is a new interpreter: a fork would copy locks and handles of devices."""
    ours, theirs = socket.socketpair()
    # Closed here after the start: if this process kept the end of its child, it would not notice that the
    # child has ended.
    with theirs:
        settings = {
            "connection": theirs.fileno(),
            "memory": memory,
            "parent": os.getpid(),
            **dict(zip(("nice", "ionice", "hook"), kind, strict=True)),
            "package": str(Path(__file__).absolute().parents[2]),
            "search": search_path(),
            "user_site": site.getusersitepackages() if site.ENABLE_USER_SITE else None,
        }
        process = subprocess.Popen(
            [sys.executable, *_options(), "-c", _BOOTSTRAP, json.dumps(settings)],
            pass_fds=(theirs.fileno(), memory),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_QUIET},
        )
    return ChildProcess(process, Connection(ours.detach()))


def search_path() -> list[str]:
    """Return where this process looks for modules, with the current directory last.

    Modules of the user in that directory are found, but never instead of others.
    """
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # it has been removed
        return [path for path in sys.path if os.path.isabs(path)]
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]
    # By real path: a link to the current directory must not come before the standard library either.
    others = [path for path in paths if os.path.realpath(path) != here]
    return [*others, here] if len(others) < len(paths) else others


def _options() -> list[str]:
    """Return the options of the interpreter: isolated mode, and otherwise those of this process."""
    # Isolated mode ignores the environment variables of Python. What they have set in this process is
    # repeated as options.
    options = ["-I", *(["-B"] if sys.flags.dont_write_bytecode else []), *["-O"] * sys.flags.optimize]
    options += [f"-W{option}" for option in sys.warnoptions]
    x_options = {"utf8": str(sys.flags.utf8_mode), **sys._xoptions}
    if sys.pycache_prefix is not None:
        x_options["pycache_prefix"] = sys.pycache_prefix
    return [
        *options,
        *(f"-X{name}" if value is True else f"-X{name}={value}" for name, value in x_options.items()),
    ]
