"""ObjectStore over a real S3 server: the conformance suite, requests, faults, and texts of errors."""

from __future__ import annotations

import errno
import itertools
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import pytest

from megackpt.engine.checkpoint.step_roots import ObjectSteps
from megackpt.errors import CheckpointError, MissingExtraError, StorageError
from megackpt.storage import COMMON_POOL, ObjectOptions, ObjectStore, Store, object_upload, open_store
from megackpt.storage.object_client import translated_object_errors
from megackpt.testing.store_suite import StoreConformance, read_range, some_bytes, write_stream
from tests.support.s3_server import (
    ACCESS_KEY,
    BUCKET,
    FAULTS,
    SECRET,
    FaultyProxy,
    S3Server,
    options_for,
    unfinished_uploads,
)
from tests.support.writers import wait_for

_numbers = itertools.count()
PART = 256 << 10  # of `options_for`
LARGE = 9 * PART + 12_345


def new_url() -> str:
    return f"s3://{BUCKET}/unit-{next(_numbers)}"


class TestObjectStore(StoreConformance):
    checks_wording = True

    has_directories = False

    @pytest.fixture
    def store(self, s3_server: S3Server) -> Store:
        return ObjectStore(new_url(), options=options_for(s3_server.port))


@pytest.fixture
def store(s3_proxy: FaultyProxy) -> Iterator[ObjectStore]:
    store = ObjectStore(new_url(), options=options_for(s3_proxy.port))
    yield store
    store.close()


# Requests.


def test_a_stream_is_as_many_requests_as_it_has_parts_and_two_and_a_short_one_is_one(
    store: ObjectStore, s3_proxy: FaultyProxy
) -> None:
    with s3_proxy.counting() as asked:
        write_stream(store, "long", some_bytes(LARGE), part_bytes=100_001)
    assert asked == {"begin": 1, "part": 10, "complete": 1}
    sizes = sorted(request.nbytes for request in s3_proxy.asked if request.kind == "part")
    assert sizes == [12_345] + [PART] * 9
    with s3_proxy.counting() as asked:
        write_stream(store, "short", some_bytes(PART), part_bytes=100_001)
        store.write("small", b"1")
        store.replace("small", b"2")
    assert asked == {"put": 3}


def test_reads_ask_for_what_is_needed_and_long_ones_in_several_requests(
    store: ObjectStore, s3_proxy: FaultyProxy
) -> None:
    write_stream(store, "a", some_bytes(LARGE), part_bytes=1 << 20)
    with s3_proxy.counting() as asked:
        assert read_range(store, "a", 5, 1005) == some_bytes(LARGE)[5:1005]
        with store.borrow("a", 7, 1000) as borrowed:
            assert borrowed == some_bytes(LARGE)[7:1007]
    assert asked == {"get": 2}
    with s3_proxy.counting() as asked:
        assert read_range(store, "a", 1, LARGE) == some_bytes(LARGE)[1:]
        assert store.read("a", max_bytes=LARGE) == some_bytes(LARGE)
    assert asked == {"get": 3 + 1}  # a megabyte each
    with s3_proxy.counting() as asked:
        assert (store.exists("a"), store.exists("b"), store.size("a")) == (True, False, LARGE)
    assert asked == {"head": 3}


def test_a_thousand_objects_are_listed_and_deleted_by_one_request(
    store: ObjectStore, s3_proxy: FaultyProxy
) -> None:
    for name in ("d/a", "d/b", "e/c", "f"):
        store.write(name, b"")
    with s3_proxy.counting() as asked:
        locations = ObjectSteps(store.location, options_for(s3_proxy.port))
        assert locations.idle_s("d") == pytest.approx(0, abs=60)
        assert locations.idle_s("none") is None
    assert asked == {"list": 2}
    with s3_proxy.counting() as asked:
        assert store.names() == ["d/a", "d/b", "e/c", "f"]
        assert store.directories() == ["d", "e"]
        store.delete(["d/a", "f", "missing", *(f"none/{i}" for i in range(900))])
    assert asked == {"list": 2, "delete": 1}
    assert store.names() == ["d/b", "e/c"]


@pytest.mark.parametrize(
    "name", ["a b", "ü/ñ", "50%", "%2F", "a+b", "x#y?z", "[0:4]", "~.tmp", "a'b\"c", "日本"]
)
def test_odd_names_are_kept_as_they_are(store: ObjectStore, name: str) -> None:
    store.write(name, b"1")
    write_stream(store, f"{name}.long", some_bytes(PART + 1), part_bytes=PART)
    assert store.names() == sorted([name, f"{name}.long"])
    assert store.read(name, max_bytes=1) == b"1"
    assert read_range(store, f"{name}.long", PART, PART + 1) == some_bytes(PART + 1)[PART:]
    store.delete([name, f"{name}.long"])
    assert store.names() == []


# Memory.


def test_a_writer_uses_few_buffers_however_slow_the_store_is(
    s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrowed, most = [0], [0]
    take, give = COMMON_POOL.take, COMMON_POOL.give_back

    def counting_take() -> object:
        borrowed[0] += 1
        most[0] = max(most[0], borrowed[0])
        return take()

    def counting_give(buffer: object) -> None:
        borrowed[0] -= 1
        give(buffer)  # type: ignore[arg-type]

    monkeypatch.setattr(object_upload.COMMON_POOL, "take", counting_take)
    monkeypatch.setattr(object_upload.COMMON_POOL, "give_back", counting_give)

    def slow(kind: str, path: str) -> str:
        if kind == "part":
            wait_for(lambda: most[0] >= 3)  # the writer is ahead of the store
        time.sleep(0.005)
        return ""

    s3_proxy.choose = slow
    store = ObjectStore(new_url(), options=options_for(s3_proxy.port, parts_in_flight=2))
    write_stream(store, "a", some_bytes(LARGE), part_bytes=LARGE)
    assert (borrowed[0], most[0]) == (0, 3)


@pytest.mark.parametrize("nbytes", [1, 80_000_000_000, 400_000_000_001])
def test_a_file_has_at_most_ten_thousand_parts_of_whole_buffers(nbytes: int) -> None:
    part = object_upload._part_bytes(nbytes, 8 << 20)
    assert part >= 8 << 20
    assert part % (4 << 20) == 0
    assert -(-nbytes // part) <= 10_000


# Faults. Each kind of request meets each kind of fault, once; the same as without.


@pytest.mark.parametrize("fault", [*FAULTS, "429"])
def test_nothing_is_lost_when_a_request_of_any_kind_fails_once(s3_proxy: FaultyProxy, fault: str) -> None:
    # What stalls is given up after so long, once for each kind of request.
    timeout = {"timeout_s": 0.5} if fault == "stall" else {}
    store = ObjectStore(new_url(), options=options_for(s3_proxy.port, **timeout))
    hit: set[str] = set()

    def once(kind: str, path: str) -> str:
        if kind in hit:
            return ""
        hit.add(kind)
        # Within an upload the library does not repeat what answers 429.
        return "" if fault == "429" and kind in ("part", "complete") else fault

    s3_proxy.choose = once
    data = some_bytes(3 * PART + 5)
    write_stream(store, "d/a", data, part_bytes=1 << 20)
    store.write("d/b", data[:1000])
    assert store.size("d/a") == len(data)
    assert read_range(store, "d/a", 3, len(data)) == data[3:]
    assert store.read("d/b", max_bytes=1000) == data[:1000]
    assert store.names() == ["d/a", "d/b"]
    store.delete(["d/b"])
    assert store.names() == ["d/a"]
    assert hit - {"abort"} == {"begin", "part", "complete", "put", "head", "get", "list", "delete"}


def test_an_older_object_is_not_taken_for_one_whose_upload_failed(
    store: ObjectStore, s3_proxy: FaultyProxy
) -> None:
    write_stream(store, "a", some_bytes(LARGE, seed=1), part_bytes=LARGE)
    s3_proxy.choose = lambda kind, path: "403" if kind == "complete" else ""
    with pytest.raises(StorageError, match="/a: cannot write: the server answered 403"):
        write_stream(store, "a", some_bytes(LARGE, seed=2), part_bytes=LARGE)
    assert store.read("a", max_bytes=LARGE) == some_bytes(LARGE, seed=1)


def test_an_upload_that_cannot_be_made_is_aborted_with_an_error(
    s3_server: S3Server, s3_proxy: FaultyProxy
) -> None:
    store = ObjectStore(new_url(), options=options_for(s3_proxy.port, max_retries=2))
    parts: list[str] = []

    def later_ones(kind: str, path: str) -> str:
        parts.extend([path] * (kind == "part"))
        return "503" if kind == "part" and len(parts) > 3 else ""

    s3_proxy.choose = later_ones
    message = (
        rf"^{store.location}/a: cannot write: the server answered 503.*, also after 2 retries. The store is"
    )
    with pytest.raises(StorageError, match=message) as caught:
        write_stream(store, "a", some_bytes(40 * PART), part_bytes=100_000)
    assert caught.value.errno == errno.EAGAIN
    assert "abort" in s3_proxy.counts()
    assert unfinished_uploads(s3_server.port, store.location) == []
    assert store.names() == []


def test_an_abandoned_upload_leaves_nothing(store: ObjectStore, s3_server: S3Server) -> None:
    with pytest.raises(KeyError), store.open_writer("a", LARGE) as writer:  # noqa: PT012
        writer.write(memoryview(some_bytes(4 * PART)))
        raise KeyError("stop")
    assert unfinished_uploads(s3_server.port, store.location) == []
    assert store.names() == []
    assert not [t for t in threading.enumerate() if t.name.startswith("megackpt-upload")]


# What is said.


def test_credentials_appear_in_no_error(store: ObjectStore, s3_proxy: FaultyProxy) -> None:
    s3_proxy.choose = lambda kind, path: "403"
    uses = (
        lambda: store.write("a", b"1"),
        lambda: write_stream(store, "a", some_bytes(LARGE), part_bytes=LARGE),
        lambda: store.read("a", max_bytes=1),
        lambda: read_range(store, "a", 0, 1),
        lambda: store.size("a"),
        lambda: store.exists("a"),
        lambda: store.names(),
        lambda: store.delete(["a"]),
    )
    for use in uses:
        with pytest.raises(StorageError, match=r"cannot .*Check the credentials .AWS_ACCESS") as caught:
            use()
        assert caught.value.errno == errno.EACCES
        shown = "".join(traceback.format_exception(caught.value))
        assert ACCESS_KEY not in shown
        assert SECRET not in shown
    for url in (f"s3://{ACCESS_KEY}:{SECRET}@bucket/x", f"s3://bucket/x?secret={SECRET}"):
        with pytest.raises(StorageError, match=r"has to look like s3://bucket/prefix") as caught:
            ObjectStore(url)
        assert SECRET not in str(caught.value)
    assert SECRET not in repr(ObjectOptions(config={"secret_access_key": SECRET}))


def test_a_missing_bucket_is_named(s3_server: S3Server) -> None:
    store = ObjectStore("s3://no-such-bucket/x", options=options_for(s3_server.port))
    for use in (lambda: store.write("a", b""), lambda: store.read("a", max_bytes=1), lambda: store.names()):
        message = "s3://no-such-bucket/x.*cannot .*NoSuchBucket.*Create the bucket"
        with pytest.raises(StorageError, match=message):
            use()


def test_a_server_that_is_not_there_or_does_not_answer_is_named(s3_proxy: FaultyProxy) -> None:
    options = options_for(1, max_retries=1, connect_timeout_s=0.5)
    with pytest.raises(StorageError, match=r"/a: cannot write: no connection.*AWS_ENDPOINT_URL"):
        ObjectStore(new_url(), options=options).write("a", b"")
    s3_proxy.choose = lambda kind, path: "stall"
    silent = ObjectStore(new_url(), options=options_for(s3_proxy.port, max_retries=1, timeout_s=0.1))
    message = "/a: cannot look up: no answer in time.*raise timeout_s"
    with pytest.raises(StorageError, match=message) as caught:
        silent.size("a")
    assert caught.value.errno == errno.ETIMEDOUT


def test_settings_that_the_library_rejects_are_named() -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    message = "s3://b: the library rejects the settings .*ObjectOptions.*: endpoind"
    with pytest.raises(StorageError, match=message):
        ObjectStore("s3://b", options=ObjectOptions(config={"endpoind": "x"}))
    with pytest.raises(ValueError, match="part_bytes is 0; give an int of at least 1"):
        ObjectOptions(part_bytes=0)


# Opening.


def test_urls_are_opened_with_the_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    url = new_url()
    store = open_store(f"{url}/")
    store.write("a", b"1")
    assert store.location == url
    assert open_store(url).names() == ["a"]
    assert open_store(f"s3://{BUCKET}").exists(f"{url.rpartition('/')[2]}/a")


@pytest.mark.parametrize(("scheme", "variable"), [("gs", "GOOGLE_APPLICATION_CREDENTIALS"), ("az", "AZURE_")])
def test_errors_of_untested_stores_have_that_word_and_the_variables_of_the_store(
    scheme: str, variable: str
) -> None:
    denied = type("PermissionDeniedError", (OSError,), {})("Server returned error status: 403")
    disconnected = OSError("HttpError { kind: Connect }")
    for error, named in ((denied, variable), (disconnected, "Check the network and the endpoint.")):
        with pytest.raises(StorageError) as caught, translated_object_errors("list", f"{scheme}://b/x"):
            raise error
        assert named in str(caught.value)
        assert f"{scheme}:// URLs are untested: obstore serves them" in str(caught.value)
        assert "AWS" not in str(caught.value)


def test_an_url_in_a_path_is_recognised(store: ObjectStore) -> None:
    with pytest.raises(
        StorageError, match=r"s3:/bucket/x: a URL has two slashes.* 's3://bucket/x' as a string"
    ):
        open_store(pathlib.Path("s3://bucket/x"))
    for url in ("s3://", "s3://bucket//x", "s3://bucket/../x"):
        with pytest.raises(CheckpointError, match=r"has to look like|has an empty part"):
            open_store(url)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'megackpt\[s3\]'"):
        open_store("s3://bucket/x")
