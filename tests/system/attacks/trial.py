"""Every attack meets every reader, each in a child process: `python -m tests.system.attacks.trial DIRECTORY`.

It watches: files that are opened, programs that are started, modules that are imported, memory, time, and
whether anything from outside of the checkpoint shows. Says what it saw as a line of JSON
for each attack. A process of its own, as an audit hook cannot be taken off again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import pickle
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megackpt
from megackpt.cli import main as run_command
from megackpt.run.checkpointer import Checkpointer
from megackpt.testing.identical import difference
from tests.system.attacks import (
    documents,
    files_and_links,
    huggingface_folders,
    indexes,
    pickles,
    pickles_of_dcp,
    zarr_arrays,
)
from tests.system.attacks.crafting import (
    ATTACKS,
    CANARY,
    DCP,
    HUGGINGFACE,
    NATIVE,
    STEP,
    Attack,
    Location,
    arrays_request,
    build_base,
    copy_of,
    dcp_request,
    request,
)

DEADLINE_S = 60.0
MOST_BYTES = 1 << 30
BUILDERS = (documents, files_and_links, huggingface_folders, indexes, pickles, pickles_of_dcp, zarr_arrays)
_STARTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.fork", "os.forkpty", "pty.spawn")
_WRITES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
)
_OTHERS = ("socket.connect", "ctypes.dlopen", "pickle.find_class", "code.__new__", "webbrowser.open")


class Watch:
    """An audit hook that notes what a reader of a checkpoint has no business with."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = allowed
        self.is_on = False
        self.seen: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in _STARTS or event in _OTHERS:
            self.seen.append(f"{event}{args!r:.200}")
        elif event == "open" or event in _WRITES:
            self._look_at(event, args[0])

    def _look_at(self, event: str, path: object) -> None:
        if not isinstance(path, (str, bytes)):
            return
        name = os.fsdecode(path)
        # One part without a '/' is opened relative to a directory that was opened before it.
        is_leaf = "/" not in name and name not in ("", ".", "..")
        if is_leaf:
            return
        # A link at the end is not followed: what counts is where it stands.
        parent, _, leaf = os.path.abspath(name).rpartition("/")
        if not f"{os.path.realpath(parent)}/{leaf}".startswith(self._allowed):
            self.seen.append(f"{event} {name!r:.200}")


def asked(base: str) -> Any:
    if base == HUGGINGFACE:
        return arrays_request()
    return dcp_request() if base == DCP else request(empty=True)


def values(base: str) -> Mapping[str, Callable[[Path], Any]]:
    """Readers that give values, which must be those that were saved."""
    return {
        "load": lambda d: megackpt.load(asked(base), d),
        "load_plain_tensors": megackpt.load_plain_tensors,
        "load_common_state_dict": megackpt.load_common_state_dict,
        "load_content_metadata": megackpt.load_content_metadata,
        "load_sharded_metadata": lambda d: sorted(megackpt.load_sharded_metadata(d)),
        "load_tensors_metadata": lambda d: {
            key: (str(t.dtype), t.global_shape) for key, t in megackpt.load_tensors_metadata(d).items()
        },
        "Checkpointer": lambda d: _resumed(base, d.parent),
    }


def _resumed(base: str, root: Path) -> Any:
    with Checkpointer(root) as checkpointer:
        if checkpointer.latest() is None:
            raise megackpt.NotACheckpointError("no step", path=str(root))
        return checkpointer.load(asked(base))


def commands(good: Path, scratch: Path) -> Mapping[str, Callable[[Path], list[str]]]:
    return {
        "ls": lambda d: ["ls", str(d.parent)],
        "inspect": lambda d: ["inspect", str(d), "--json"],
        "verify": lambda d: ["verify", str(d), "--deep"],
        "diff": lambda d: ["diff", str(d), str(good)],
        "convert": lambda d: ["convert", str(d), str(scratch / "converted"), "--to", "megackpt"],
    }


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Run a command in this process; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(arguments)
    return code, out.getvalue(), err.getvalue()


def outcomes(attack: Attack, location: Location, base: Base, scratch: Path) -> dict[str, str]:
    """Run all readers; return what each did: "equal", "rejected: ...", "exit N", or what it must not do."""
    outcome_of: dict[str, str] = {}
    for name, read in values(attack.base).items():
        outcome_of[name] = _value(name, lambda read=read: read(location.directory), base.expected)  # type: ignore[misc]
    for name, arguments in commands(base.good, scratch).items():
        outcome_of[name] = _command(arguments(location.directory))
    converted = scratch / "converted"
    if outcome_of["convert"] == "exit 0" and converted.exists():
        read = values(attack.base)["load"]
        loaded = _value("load", lambda: read(converted), base.expected)
        if outcome_of["load"].startswith("rejected: UnknownClassError") and "ForeignObject(" in loaded:
            # A conversion carries an object of an unknown class along, as a stand-in that is never made.
            loaded = loaded.replace("other: ", "stands in: ")
        outcome_of["load of converted"] = loaded
    # What is listed of a checkpoint that cannot be loaded need not be what was saved.
    if outcome_of["load"] != "equal":
        for name in ("load_sharded_metadata", "load_tensors_metadata"):
            outcome_of[name] = outcome_of[name].replace("other: ", "lists: ")
    return outcome_of


def _value(name: str, read: Any, expected: dict[str, Any]) -> str:
    try:
        value = read()
    except megackpt.CheckpointError as error:
        text = f"{type(error).__name__}: {error}"
        if CANARY.decode() in text:
            return f"WRONG: shows what is outside: {text[:300]}"
        if error.path is None and error.key is None:
            return f"WRONG: names neither file nor key: {text[:300]}"
        return f"rejected: {text[:300]}"
    except BaseException as error:  # noqa: BLE001 - what must not be seen, whatever it is
        return _wrong(error)
    try:
        shown = repr(value)
    except Exception as error:  # noqa: BLE001 - a value of torch's own that torch cannot show
        return f"other: it cannot be shown: {error}"
    if CANARY.decode() in shown:
        return f"WRONG: shows what is outside: {shown:.300}"
    reason = difference(value, expected[name])
    return "equal" if reason is None else f"other: {reason}"


def _wrong(error: BaseException) -> str:
    frames = "".join(traceback.format_tb(error.__traceback__)[-2:])
    return f"WRONG: {type(error).__name__}: {error!s:.200} {frames}"


def _command(arguments: list[str]) -> str:
    try:
        code, out, err = run(arguments)
    except BaseException as error:  # noqa: BLE001 - the same
        return _wrong(error)
    if CANARY.decode() in out + err:
        return "WRONG: shows what is outside"
    if code not in (0, 1, 2, 3) or "Traceback" in err:
        return f"WRONG: exit {code}: {err:.300}"
    return f"exit {code}"


@dataclass(frozen=True, slots=True)
class Base:
    """A real checkpoint, what readers make of it, and another one like it."""

    good: Path
    other: Path
    expected: dict[str, Any]


def base_of(kind: str, root: Path) -> Base:
    slug = kind.replace(":", "-")
    good, other = (root / f"{name}-{slug}" / STEP for name in ("good", "other"))
    scratch = root / f"scratch-{slug}"
    scratch.mkdir()

    def build() -> dict[str, Any]:
        build_base(kind, good)
        build_base(kind, other)
        for arguments in commands(good, scratch).values():
            code, out, err = run(arguments(good))
            assert code == 0, out + err
        return {name: read(good) for name, read in values(kind).items()}

    expected, end = in_child(build, deadline_s=60)
    assert expected is not None, end
    return Base(good, other, expected)


def in_child(work: Callable[[], Any], *, deadline_s: float) -> tuple[Any, str]:
    """Return what work returns in a forked process, or None and how that ended.

    A fork each, as tensorstore's threads do not survive one: this process never uses it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            message = pickle.dumps(work())
            while message:
                message = message[os.write(writing, message) :]
        except BaseException:  # noqa: BLE001 - the parent sees that nothing was said
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    data, began, is_late = b"", time.monotonic(), False
    while not is_late:
        if select.select([reading], [], [], 0.5)[0]:
            part = os.read(reading, 1 << 20)
            if not part:
                break
            data += part
        is_late = time.monotonic() - began > deadline_s
    if is_late:
        os.kill(pid, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if is_late or not data:
        return None, "it hangs" if is_late else f"it ends with status {status}"
    return pickle.loads(data), ""


def attempt(attack: Attack, root: Path, base: Base) -> dict[str, Any]:
    """Build an attack and run it in a child process; return what was seen."""
    home = root / attack.name
    location = Location(
        directory=copy_of(base.good, home / "run" / STEP),
        outside=home / "outside",
        ran=home / "ran",
        other=base.other,
    )
    location.outside.mkdir()
    (location.outside / "secret").write_bytes(CANARY * 4096)
    scratch = home / "scratch"
    scratch.mkdir()
    attack.build(location)
    there = _listing(home / "outside")
    began = time.monotonic()
    message, end = in_child(lambda: _watched(attack, location, base, scratch), deadline_s=DEADLINE_S)
    message = message or {"outcomes": {"process": f"WRONG: {end}"}, "seen": []}
    if location.ran.exists():
        message["seen"].append("code of the checkpoint has run")
    if _listing(home / "outside") != there:
        message["seen"].append("what lies outside was changed")
    seconds = time.monotonic() - began
    kind = "harmless" if attack.is_harmless else "another" if attack.is_another else "rejected"
    shutil.rmtree(home)
    return {"attack": attack.name, "claim": attack.claim, "kind": kind, "s": seconds, **message}


def _listing(directory: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_size) for path in directory.rglob("*"))


def _watched(attack: Attack, location: Location, base: Base, scratch: Path) -> dict[str, Any]:
    os.chdir(location.outside)  # a name that is taken relative to this would be found here
    before = _peak_bytes()
    limit = virtual_bytes() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    own = (Path(megackpt.__file__).parents[1], location.directory.parent, scratch, base.good.parent)
    watch = Watch((sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/dev/null", *map(str, own)))
    sys.addaudithook(watch)
    watch.is_on = True
    by_reader = outcomes(attack, location, base, scratch)
    watch.is_on = False
    grown = _peak_bytes() - before
    if grown > MOST_BYTES // 2:
        watch.seen.append(f"memory grew by {grown:,} bytes")
    return {"outcomes": by_reader, "seen": watch.seen[:10], "grown": grown}


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _import_all(root: Path) -> None:
    """Let this process import what readers do, for all children at once."""
    importlib.import_module("tensorstore")
    for version in ("1", "3"):
        importlib.import_module(f"megackpt.formats.zarr.version_{version}")
    for kind in (NATIVE, DCP):
        good, scratch = root / kind / STEP, root / f"scratch-{kind}"
        build_base(kind, good)
        for read in values(kind).values():
            read(good)
        for arguments in commands(good, scratch).values():
            run(arguments(good))


def trials(root: Path, chosen: list[str]) -> Iterator[dict[str, Any]]:
    """Run attacks, all of them or those that are chosen."""
    bases: dict[str, Base] = {}
    _import_all(root / "warm")
    for name, attack in ATTACKS.items():
        if chosen and name not in chosen and not any(c.endswith("*") and c[:-1] in name for c in chosen):
            continue
        if attack.base not in bases:
            bases[attack.base] = base_of(attack.base, root)
        yield attempt(attack, root, bases[attack.base])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="an empty directory")
    parser.add_argument("names", nargs="*", help="names, or parts with a * behind; all without any")
    arguments = parser.parse_args()
    for message in trials(arguments.root, arguments.names):
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
