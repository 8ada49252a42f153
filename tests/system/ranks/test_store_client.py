"""A store whose process is stopped: calls end before their deadline, and so does the interpreter."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from megackpt import WriterFailedError
from megackpt.comm.store_client import StoreClient, StoreTimeoutError
from megackpt.comm.store_group import StoreGroup
from megackpt.comm.store_host import StoreAddress, connect_store
from tests.support.writers import stop_process

_SERVER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
print(store.port, flush=True)
time.sleep(600)
"""

_PROGRAM = """
import atexit, os, signal, socket, sys
from tests.support.writers import stop_process
others = socket.socketpair(), socket.socket()  # connections that are none of ours, or none
server, port = int(sys.argv[1]), int(sys.argv[2])
# Registered first, so called last: a thread that waits for it would come back while the interpreter ends.
atexit.register(os.kill, server, signal.SIGKILL)
from megackpt.comm.store_host import StoreAddress, connect_store
client = connect_store(StoreAddress("127.0.0.1", port), timeout_s=30)
client._answer_s = 0.3
stop_process(server)
try:
    client.get("key")
except RuntimeError as error:
    print(error)
"""


LONG_S = 120.0


def started() -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process, port = started()
    yield process, port
    process.kill()
    process.communicate()


def test_no_call_of_a_store_whose_process_is_stopped_outlasts_its_deadline(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = server
    address = StoreAddress("127.0.0.1", port)
    calls: dict[str, Callable[[StoreClient], object]] = {
        "get": lambda c: c.get("key"),
        "add": lambda c: c.add("count", 1),
        "check": lambda c: c.check(["key"]),
        "compare_set": lambda c: c.compare_set("other", "", "value"),
        "delete_key": lambda c: c.delete_key("key"),
        "num_keys": lambda c: c.num_keys(),
        "wait": lambda c: c.wait(["none"], timedelta(seconds=0.1)),
    }
    clients = {name: connect_store(address, timeout_s=30) for name in (*calls, "group")}
    clients["get"].set("key", b"value")
    assert clients["check"].check(["key"])
    assert clients["get"].get("key") == b"value"
    with pytest.raises(dist.DistStoreError):  # an answer
        clients["wait"].wait(["none"], timedelta(seconds=0.1))
    stop_process(process.pid)
    for name, call in calls.items():
        clients[name]._answer_s = 0.2
        began = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=r"no answer within 0\.2 s"):
            call(clients[name])
        clients[name]._answer_s = LONG_S  # not waited for again
        with pytest.raises(StoreTimeoutError):
            call(clients[name])
        assert time.monotonic() - began < LONG_S, name
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"127.0.0.1:{port} cannot be reached: no answer within"):
        connect_store(address, timeout_s=0.2)
    clients["group"]._answer_s = 0.2
    group = StoreGroup(clients["group"], prefix="job", rank=1, size=2, timeout_s=2 * LONG_S)
    with pytest.raises(WriterFailedError, match=r"Rank 0, which hosts the store .* did not answer") as raised:
        group.all_gather(b"")
    assert raised.value.rank == 0
    group.leave()
    assert time.monotonic() - began < LONG_S


def test_an_interpreter_ends_in_order_while_a_call_is_stuck(
    server: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = server
    program = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(process.pid), str(port)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert (program.returncode, program.stdout) == (0, "no answer within 0.3 s\n"), program.stderr
    assert "Exception ignored" not in program.stderr
