"""The writer process as a process of the system: its start, its progress, and its end.

It is a new interpreter that does not trust the current directory. Training is often started in a directory
that others can write to, so a module there never takes the place of one of the standard library or of an
installed package.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import site
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from megackpt.engine.background.messages import BEAT_S

END_S = 5.0
"""How long a process, or a thread that serves it, may take to end."""


class ChildProcess:
    """A child process and the connection to it. Any thread may use it.

    Attributes:
        connection: exchanges messages with it.
        why_killed: the reason, as a verb that follows "The process"; empty if `kill` was given none.
    """

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self._process = process
        self.connection = connection
        self.why_killed = ""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self, reason: str = "") -> None:
        """Kill it; do nothing if it has ended."""
        self.why_killed = self.why_killed or reason
        self._process.kill()

    def end(self) -> None:
        """Wait until it has ended by itself; kill it if it does not, or if there is a reason to."""
        if self.why_killed or not self.has_ended(END_S):
            self._process.kill()
            self.has_ended(END_S)

    def has_ended(self, most_s: float = 0.0) -> bool:
        """Return whether it ends within most_s seconds. One that is stuck in the kernel cannot be killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(most_s)
        return self._process.returncode is not None

    def how_it_ended(self) -> str:
        """Return how it ended, as a verb that follows "The process"."""
        if self.why_killed:
            return f"{self.why_killed} and was killed"
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


class ProgressWatch:
    """Measures for how long a process has made no progress. For one thread, which checks once in BEAT_S.

    It counts checks and reads no clock. If this process is stopped itself, by a scheduler or a debugger,
    the clock goes on, and the other process would look stuck.

    Attributes:
        silent_s: for how long, in seconds.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._bytes_moved = 0
        self.silent_s = 0.0

    def reset(self) -> None:
        """Note a message, or that there is nothing to do."""
        self.silent_s = 0.0

    def check(self) -> None:
        """Note that BEAT_S have passed without a message."""
        bytes_moved = _bytes_moved(self._pid)
        self.silent_s = self.silent_s + BEAT_S if bytes_moved == self._bytes_moved else 0.0
        self._bytes_moved = bytes_moved


def _bytes_moved(pid: int) -> int:
    """Return how many bytes system calls of a process have read and written; 0 if the system does not count.

    A large file is written by many such calls, during which the process sends no message. Sockets are not
    counted. Source: proc_pid_io(5).
    """
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


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
