"""Voices in an object store: what replicas see of each other, one winner, and whole voices whoever dies or comes between."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
import pytest
from fsspec import register_implementation
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from duetts.config import VoicesConfig
from duetts.errors import ConfigError, InvalidRequest, StorageFailure, StoreUnreachable, VoiceExists, VoiceNotFound
from duetts.synthesizer import Synthesizer
from duetts.types import SpeakerInfo, VoiceDraft
from duetts.voices import bucket as bucket_module
from duetts.voices.bucket import Bucket, located
from duetts.voices.consents import ConsentStore
from duetts.voices.library import VoiceLibrary
from duetts.voices.names import folder_name
from duetts.voices.objects import FRESH_S, OUTAGE_S, ObjectVoices, open_store
from duetts.voices.store import RECORD, UNFINISHED_S, VoiceStore
from tests.inputs import REF_TEXT
from tests.test_default_voice import SteadySpeaker
from tests.voices.buckets import KINDS, Between, Killed, a_bucket
from tests.voices.test_library import CLIP, OTHER, Bench, preset
from tests.voices.test_store import CODES, a_voice

FOLDER = folder_name("Anna")
T = TypeVar("T")


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with a_bucket(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[str]:
    with a_bucket("memory", tmp_path) as found:
        yield found


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("duetts").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("duetts").setLevel(logging.NOTSET)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def voices_at(url: str, clock: Callable[[], float] = time.monotonic, max_voices: int = 10) -> ObjectVoices:
    return ObjectVoices(Bucket(url), max_voices, 1 << 20, clock)


def names_at(url: str) -> list[str]:
    return sorted(item.name for item in Bucket(url).items())


def grow_old(folder: Path, but: str) -> None:
    """All files in it, but those with that in their path."""
    for path in folder.rglob("*"):
        if path.is_file() and but not in str(path):
            os.utime(path, (time.time() - 2 * UNFINISHED_S,) * 2)


# -- what one replica does is seen by another


def test_a_voice_comes_changes_and_goes(url: str) -> None:
    clock = Clock()
    one, other = voices_at(url, clock), voices_at(url, clock)
    assert other.find("Anna") is None
    assert one.all() == other.all() == []
    added = one.add(a_voice(audio=b"first"), b"first", "codec", CODES, replace=False)
    seen = other.find(" ANNA ")  # at once, although it was just looked for in vain
    assert seen is not None
    assert (seen.voice, seen.revision, seen.audio()) == (added.voice, added.revision, b"first")
    assert np.array_equal(seen.codes("codec"), CODES)
    assert seen.codes("another codec") is None
    assert other.holds("anna")
    with pytest.raises(VoiceExists):
        other.add(a_voice(audio=b"other"), b"other", replace=False)
    changed = one.add(a_voice(audio=b"second", transcript="Else."), b"second", replace=True)
    assert other.find("anna") == added  # it is not looked at again so soon
    assert [voice.revision for voice in other.all()] == [changed.revision]  # a list is
    assert other.find("anna") == changed
    with pytest.raises(FileNotFoundError):
        seen.audio()
    assert one.remove("anna")
    assert not one.remove("anna")
    assert other.find("anna") == changed
    clock.now += FRESH_S
    assert other.find("anna") is None
    assert other.all() == []
    assert names_at(url) == []


def test_codes_of_few_codecs_are_kept(url: str) -> None:
    one = voices_at(url)
    added = one.add(a_voice(), b"clip", replace=False)
    for number in range(6):
        added.keep_codes(f"codec {number}", CODES)
        time.sleep(0.02)  # stores tell times, some of them coarsely
    assert sum("codes-" in name for name in names_at(url)) == 4
    assert added.codes("codec 5") is not None


def test_of_many_that_add_one_name_one_wins(url: str) -> None:
    together = Barrier(6)

    def add(number: int) -> bool:
        store = voices_at(url)
        clip = f"clip {number}".encode()
        together.wait()
        try:
            store.add(a_voice(audio=clip), clip, replace=False)
        except VoiceExists:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(add, range(6)))
    assert won.count(True) == 1
    found = voices_at(url).find("anna")
    assert found is not None
    assert found.audio() == f"clip {won.index(True)}".encode()
    assert len(names_at(url)) == 2  # losers leave nothing


def test_bounds(memory: str) -> None:
    store = voices_at(memory, max_voices=2)
    store.add(a_voice("a1"), b"clip", replace=False)
    store.add(a_voice("a2"), b"clip", replace=False)
    with pytest.raises(InvalidRequest) as refusal:
        voices_at(memory, max_voices=2).add(a_voice("a3"), b"clip", replace=False)
    assert refusal.value.code == "voice_limit"
    store.add(a_voice("a2"), b"clip", replace=True)
    with pytest.raises(InvalidRequest):
        store.add(a_voice("a1", audio=b"x" * (1 << 20)), b"x", replace=True)


def test_lists_read_only_what_has_changed(memory: str) -> None:
    writer = voices_at(memory)
    for number in range(5):
        writer.add(a_voice(f"v{number}"), b"clip", replace=False)
    counting = Between(memory, -1, lambda: None)
    store = ObjectVoices(counting, 10, 1 << 20)
    read: list[str] = []
    whole = counting.read_all
    counting.read_all = lambda names: whole([read.append(name) or name for name in names])  # type: ignore[func-returns-value]
    assert len(store.all()) == len(read) == 5
    writer.add(a_voice("v3", transcript="New."), b"clip", replace=True)
    assert [voice.voice.transcript for voice in store.all() if voice.voice.name == "v3"] == ["New."]
    assert len(read) == 6


# -- whoever dies or comes between


def is_whole(url: str) -> str:
    """The clip of the voice, whose record, codes and clip are of one revision; empty if there is none."""
    found = voices_at(url).find("anna")
    if found is None:
        return ""
    clip = found.audio()
    assert found.voice.num_bytes == len(clip)
    codes = found.codes("codec")
    assert codes is None or codes[0, 0] == len(clip)
    return clip.decode()


def put(store: ObjectVoices, clip: bytes, replace: bool) -> None:
    codes = np.full((4, 10), len(clip), np.int32)
    store.add(a_voice(audio=clip), clip, "codec", codes, replace=replace)


WORKS: dict[str, tuple[Callable[[ObjectVoices], object], set[str]]] = {
    "add": (lambda store: put(store, b"new", replace=False), {"", "new"}),
    "replace": (lambda store: put(store, b"newer", replace=True), {"old", "newer"}),
    "remove": (lambda store: store.remove("anna"), {"old", ""}),
}


def die() -> None:
    raise Killed


@pytest.mark.parametrize("work", WORKS)
def test_a_process_that_dies_leaves_the_old_voice_or_the_new_one(work: str, tmp_path: Path) -> None:
    do, outcomes = WORKS[work]
    seen = set()
    for number in range(50):
        with a_bucket("memory", tmp_path) as url:
            if work != "add":
                put(voices_at(url), b"old", replace=False)
            bucket = Between(url, number, die)
            try:
                do(ObjectVoices(bucket, 10, 1 << 20))
            except Killed:
                seen.add(is_whole(url))
                put(voices_at(url), b"afterwards", replace=True)  # and it is no obstacle
                assert is_whole(url) == "afterwards"
                continue
            assert number > 3
            seen.add(is_whole(url))
            assert seen <= outcomes
            assert len(seen) == 2
            return
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize("first", WORKS)
@pytest.mark.parametrize("between", ["replace", "remove", "remove and add"])
def test_whoever_comes_between_a_voice_is_whole_or_gone(first: str, between: str, tmp_path: Path) -> None:
    """Before each operation of one replica another one does all of its work."""
    for number in range(50):
        with a_bucket("memory", tmp_path) as url:
            if first != "add":
                put(voices_at(url), b"old", replace=False)

            def come(url: str = url) -> None:
                if "remove" in between:
                    voices_at(url).remove("anna")
                if between != "remove":
                    put(voices_at(url), b"between", replace=True)

            bucket = Between(url, number, come)
            try:
                WORKS[first][0](ObjectVoices(bucket, 10, 1 << 20))
            except VoiceExists:
                assert first == "add"
            assert is_whole(url) in {"", "new", "newer", "between"}
            if bucket.count <= number:
                return
    raise AssertionError("it never came to its end")


KILLER = """
import sys
from tests.voices.test_objects import put, voices_at
store = voices_at(sys.argv[1])
print("ready", flush=True)
for number in range(100000):
    put(store, b"x" * (number % 7 + 1), replace=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_whole_voice(tmp_path: Path) -> None:
    with a_bucket("shelf", tmp_path) as url:
        for number in range(12):
            process = subprocess.Popen([sys.executable, "-c", KILLER, url], stdout=subprocess.PIPE, cwd=os.getcwd())
            assert process.stdout is not None
            assert process.stdout.readline()
            time.sleep(0.05 + 0.013 * number)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            assert is_whole(url)


class Changed(Bucket):
    """A bucket whose driver puts objects in another way."""

    def __init__(self, url: str, put: Callable[[Any, str, bytes, str], None]) -> None:
        super().__init__(url)
        files = self._files

        class Files:
            def __getattr__(self, name: str) -> Any:
                return getattr(files, name)

            def pipe_file(self, path: str, content: bytes, mode: str, **_: object) -> None:
                put(files, path, content, mode)

        self._files = Files()


def test_a_voice_whose_answer_was_lost_is_there_and_whole(memory: str) -> None:
    def put(files: Any, path: str, content: bytes, mode: str) -> None:
        files.pipe_file(path, content)
        if mode == "create":
            files.pipe_file(path, content, mode=mode)  # the driver tries again, and its own object is in the way

    put_twice = ObjectVoices(Changed(memory, put), 10, 1 << 20)
    added = put_twice.add(a_voice(audio=b"mine"), b"mine", replace=False)
    assert is_whole(memory) == "mine"
    assert voices_at(memory).find("anna") == added
    with pytest.raises(VoiceExists):
        voices_at(memory).add(a_voice(audio=b"other"), b"other", replace=False)


def test_rubbish_goes_with_time_and_nothing_else_does(tmp_path: Path) -> None:
    with a_bucket("shelf", tmp_path) as url:
        bucket, store = Bucket(url), voices_at(url)
        store.add(a_voice(), b"clip", replace=False)
        bucket.write(f"{folder_name('gone')}/audio-{'0' * 16}", b"of a process that died")
        bucket.write(f"{FOLDER}/audio-{'1' * 16}", b"of a process that died")
        bucket.write(f"{folder_name('half')}/audio-{'2' * 16}", b"of one that is writing")
        bucket.write(f"{folder_name('damaged')}/{RECORD}", b"{")
        bucket.write(f"{folder_name('damaged')}/audio-{'3' * 16}", b"somebody may want it")
        bucket.write("notes.txt", b"not ours")
        before = names_at(url)
        grow_old(tmp_path / "bucket", but="2" * 16)
        store.add(a_voice("Bob"), b"clip", replace=False)
        gone = set(before) - set(names_at(url))
        assert gone == {f"{folder_name('gone')}/audio-{'0' * 16}", f"{FOLDER}/audio-{'1' * 16}"}


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", json.dumps({"format": 1, "revision": "x"}).encode(), b"\xff"])
def test_a_damaged_record_is_left_out_and_can_be_replaced_or_removed(memory: str, content: bytes) -> None:
    Bucket(memory).write(f"{FOLDER}/{RECORD}", content)
    store = voices_at(memory)
    assert store.find("anna") is None
    assert store.all() == []
    assert store.holds("anna")
    with pytest.raises(VoiceExists):
        store.add(a_voice(), b"clip", replace=False)
    store.add(a_voice(), b"clip", replace=True)
    assert is_whole(memory) == "clip"
    Bucket(memory).write(f"{FOLDER}/{RECORD}", content)
    assert store.remove("anna")
    assert names_at(memory) == []


# -- a store that does not answer


class Unreachable(Bucket):
    """As a driver does it: with errors of its own library."""

    down = False

    class DriverError(Exception):
        pass

    def __init__(self, url: str) -> None:
        super().__init__(url)
        files = self._files
        driver = self

        class Files:
            def __getattr__(self, name: str) -> object:
                if driver.down:
                    raise Unreachable.DriverError("s3://secret-bucket: connection refused")
                return getattr(files, name)

        self._files = Files()


def test_known_voices_outlast_an_outage_for_a_while(memory: str) -> None:
    clock, bucket = Clock(), Unreachable(memory)
    store = ObjectVoices(bucket, 10, 1 << 20, clock)
    added = store.add(a_voice(), b"clip", replace=False)
    bucket.down = True
    clock.now += OUTAGE_S / 2
    assert store.find("anna") == added
    for work in (lambda: store.find("unknown"), store.all, lambda: store.remove("anna"), lambda: store.holds("anna"),
                 lambda: store.add(a_voice("Bob"), b"clip", replace=False), added.audio):  # fmt: skip
        with pytest.raises(StorageFailure) as failure:
            work()
        assert isinstance(failure.value, StoreUnreachable)
        assert "secret" not in str(failure.value)
    assert added.codes("codec") is None
    added.keep_codes("codec", CODES)
    clock.now += OUTAGE_S
    with pytest.raises(StorageFailure):
        store.find("anna")
    bucket.down = False
    assert store.find("anna") == added


def test_what_a_store_does_not_allow_is_not_tried_again(memory: str) -> None:
    def put(*_: object) -> None:
        raise PermissionError("s3://secret-bucket")

    with pytest.raises(StorageFailure) as failure:
        ObjectVoices(Changed(memory, put), 10, 1 << 20).add(a_voice(), b"clip", replace=False)
    assert not isinstance(failure.value, StoreUnreachable)
    assert "secret" not in str(failure.value)


async def test_without_a_store_servers_start_and_speak_what_they_have(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duetts.voices.objects.located", lambda place: Unreachable(place) if place == memory else place)
    monkeypatch.setattr(Unreachable, "down", True)
    preset(tmp_path, "Bert", default=True)
    for default in ("auto", "bert"):
        for library in libraries(memory, tmp_path, default):
            await library.prepare()
            for name in ("bert", ""):
                spoken = await library.choose(name, "voice", or_default=False)
                assert spoken is not None
                assert spoken.name == "Bert"
            assert (await library.get("bert")).origin == "preset"
            for name in ("anna", "carla"):
                with pytest.raises(StoreUnreachable):
                    await library.choose(name, "voice", or_default=False)


async def test_the_default_voice_comes_with_the_store_and_outlasts_it(
    memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duetts.voices.objects.located", lambda place: Unreachable(place) if place == memory else place)
    monkeypatch.setattr(Unreachable, "down", True)
    library, _ = libraries(memory, tmp_path, "anna")
    await library.prepare()
    with pytest.raises(StoreUnreachable):
        await library.choose("", "voice", or_default=False)
    monkeypatch.setattr(Unreachable, "down", False)
    await library.add(VoiceDraft("Anna", CLIP, REF_TEXT), replace=False)
    await library.prepare()
    monkeypatch.setattr(Unreachable, "down", True)
    library._store.forget("anna")  # as after ten minutes
    spoken = await library.choose("default", "voice", or_default=False)
    assert spoken is not None
    assert spoken.name == "Anna"


class Hanging(AsyncFileSystem):  # type: ignore[misc]
    """A store in memory that waits for a network, which may go silent."""

    protocol = "hanging"
    silent = False
    asked = 0

    async def _wait(self) -> None:
        Hanging.asked += 1
        if Hanging.silent:
            await asyncio.sleep(3600)

    async def _cat_file(self, path: str, **_: object) -> bytes:
        await self._wait()
        return bytes(MemoryFileSystem().cat_file(path))

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        await self._wait()
        MemoryFileSystem().pipe_file(path, value, mode=mode)

    async def _rm_file(self, path: str, **_: object) -> None:
        await self._wait()
        MemoryFileSystem().rm_file(path)

    async def _find(self, path: str, detail: bool = False, **_: object) -> Any:
        await self._wait()
        return MemoryFileSystem().find(path, detail=detail)


register_implementation("hanging", Hanging, clobber=True)


def test_a_store_that_hangs_is_waited_for_once_and_comes_back(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, store_clock = Clock(), Clock()
    monkeypatch.setattr(bucket_module, "monotonic", clock)
    monkeypatch.setattr(Hanging, "silent", False)
    store = ObjectVoices(Bucket(memory.replace("memory://", "hanging://")), 10, 1 << 20, store_clock)
    added = store.add(a_voice(), b"clip", replace=False)
    assert [voice.revision for voice in store.all()] == [added.revision]
    monkeypatch.setattr(Hanging, "silent", True)
    patience_s = bucket_module.LIMIT_S
    monkeypatch.setattr(bucket_module, "LIMIT_S", 0.2)
    store_clock.now += FRESH_S
    asked = Hanging.asked
    assert [store.find("anna") for _ in range(100)] == [added] * 100
    for work in (lambda: store.find("berta"), store.all, lambda: put(store, b"new", replace=True), lambda: store.remove("anna"),
                 added.audio):  # fmt: skip
        with pytest.raises(StoreUnreachable):
            work()
    assert Hanging.asked == asked + 1
    clock.now += bucket_module.REST_S
    with ThreadPoolExecutor(8) as pool:  # one of them asks
        assert list(pool.map(lambda _: store.find("anna"), range(8))) == [added] * 8
    assert Hanging.asked == asked + 2
    clock.now += bucket_module.REST_S
    monkeypatch.setattr(bucket_module, "LIMIT_S", patience_s)
    monkeypatch.setattr(Hanging, "silent", False)
    put(store, b"newer", replace=True)
    assert store.remove("anna")
    assert store.find("anna") is None


@pytest.mark.parametrize("work", ["replace", "remove", "add"])
@pytest.mark.parametrize("look", ["find", "all"])
def test_who_looked_before_this_process_changed_a_voice_does_not_bring_the_old_one_back(
    work: str, look: str, memory: str
) -> None:
    """What was read is late: meanwhile the voice is replaced or removed here."""

    class Late(Bucket):
        late = False

        def read(self, name: str) -> bytes:
            return self.change_after(lambda: Bucket.read(self, name))

        def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
            return self.change_after(lambda: Bucket.read_all(self, names))

        def change_after(self, read: Callable[[], T]) -> T:
            found: T | FileNotFoundError
            try:
                found = read()
            except FileNotFoundError as error:
                found = error
            if self.late:
                self.late = False
                WORKS[work][0](store)
            if isinstance(found, FileNotFoundError):
                raise found
            return found

    if work != "add":
        put(voices_at(memory), b"old", replace=False)
    bucket, clock = Late(memory), Clock()
    store = ObjectVoices(bucket, 10, 1 << 20, clock)
    bucket.late = True
    store.find("anna") if look == "find" else store.all()
    found = store.find("anna", known_elsewhere=True)
    assert (found.audio() if found else b"").decode() == {"replace": "newer", "remove": "", "add": "new"}[work]


@pytest.mark.parametrize("word", ["ConditionalRequestConflict", "PreconditionFailed"])
def test_who_loses_to_one_that_creates_at_the_same_moment_is_told_that_the_voice_exists(memory: str, word: str) -> None:
    """S3 says 409 while another object of the name is being created. The driver has no name for that error."""

    def put(files: Any, path: str, content: bytes, mode: str) -> None:
        if mode == "create":
            voices_at(memory).add(a_voice(audio=b"winner"), b"winner", replace=False)
            raise OSError(5, f"An error occurred ({word}) when calling the PutObject operation: ...")
        files.pipe_file(path, content)

    with pytest.raises(VoiceExists):
        ObjectVoices(Changed(memory, put), 10, 1 << 20).add(a_voice(), b"loser", replace=False)
    assert is_whole(memory) == "winner"
    assert len(names_at(memory)) == 2


# -- which place is which


def test_places(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path, 1, 1), VoiceStore)
    assert located(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert located("~/voices") == Path.home() / "voices"
    assert isinstance(open_store("memory://x/voices", 1, 1), ObjectVoices)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nosuch://x", "nosuch:// cannot be used here"),
        ("simplecache::s3://secret", "chained"),
        ("gs://secret", "gs:// cannot"),
    ],
)
def test_places_that_cannot_be(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as failure:
        open_store(url, 1, 1)
    assert "secret" not in str(failure.value)


# -- the library and consents over it


async def test_two_libraries_share_voices(memory: str, tmp_path: Path) -> None:
    benches = [Bench(tmp_path / name) for name in ("one", "other")]
    info = SpeakerInfo("fake", 44100, 2048, 4, 1024, weights="trained", codec_id="codec")
    config = VoicesConfig(memory, default_voice="seed:7")
    one, other = (VoiceLibrary(config, tmp_path / "presets", info, bench.references, bench) for bench in benches)
    await one.prepare()
    await other.prepare()
    assert benches[0].asked == [7]
    assert benches[1].asked == []  # the clip that the first has made is everybody's
    await one.add(VoiceDraft("Anna", CLIP, REF_TEXT), replace=False)
    spoken = await other.choose("anna", "voice", or_default=False)
    assert spoken is not None
    assert spoken.hit
    assert benches[1].encoded == 0
    assert [voice.name for voice in await other.all()] == ["Anna", one.default_name]
    await other.change("anna", new_name="Berta")
    await other.remove("berta")
    with pytest.raises(VoiceNotFound):
        await one.get("berta")


def libraries(url: str, folder: Path, default_voice: str = "none") -> list[VoiceLibrary]:
    """Two replicas that share a store."""
    info = SpeakerInfo("fake", 44100, 2048, 4, 1024, weights="trained", codec_id="codec")
    config = VoicesConfig(url, default_voice=default_voice, share_audio=True)
    benches = [Bench(folder / name) for name in ("one", "other")]
    return [VoiceLibrary(config, folder / "presets", info, bench.references, bench) for bench in benches]


async def test_a_voice_that_was_just_listed_and_then_changed_elsewhere_is_no_damaged_one(memory: str, tmp_path: Path) -> None:
    one, other = libraries(memory, tmp_path)
    await one.add(VoiceDraft("Anna", CLIP, REF_TEXT), replace=False)
    assert await other.all()
    await one.add(VoiceDraft("Anna", CLIP, "Other words."), replace=True)
    spoken = await other.choose("anna", "voice", or_default=False)
    assert spoken is not None
    assert spoken.transcript == "Other words."
    await one.add(VoiceDraft("Anna", OTHER, REF_TEXT), replace=True)
    assert await other.audio("anna") == OTHER
    await one.add(VoiceDraft("Berta", CLIP, REF_TEXT), replace=False)
    assert await other.all()
    await one.remove("berta")
    with pytest.raises(VoiceExists):
        await other.change("berta", tags="seen before it went")
    with pytest.raises(VoiceNotFound):
        await other.change("berta", tags="seen that it went")
    await one.add(VoiceDraft("Carla", CLIP, REF_TEXT), replace=False)
    assert await other.all()
    await one.remove("carla")
    with pytest.raises(InvalidRequest) as failure:
        await other.choose("carla", "voice", or_default=False)
    assert failure.value.code == "unknown_voice"


async def test_consents_are_shared(url: str) -> None:
    one, other = (ConsentStore(f"{url}/consents", 2, 100, 10) for _ in range(2))
    first = await one.add("n", "en", b"recording")
    assert await other.get(first.id) == first
    assert (await other.rename(first.id, "m")).name == "m"
    second = await other.add("k", "de", b"recording")
    assert {consent.name for consent in await one.all()} == {"m", "k"}
    with pytest.raises(InvalidRequest):
        await one.add("too many", "en", b"recording")
    for consent in (first, second):
        await one.remove(consent.id)
        with pytest.raises(VoiceNotFound):
            await other.get(consent.id)
    assert names_at(url) == []
    one.close()
    other.close()


@pytest.mark.parametrize("place", ["folder", "bucket"])
async def test_a_recording_without_its_record_can_be_removed(place: str, memory: str, tmp_path: Path) -> None:
    store = ConsentStore(tmp_path if place == "folder" else memory, 2, 100, 10)
    left, whole = [await store.add(name, "en", b"recording") for name in ("left", "whole")]
    Bucket(memory).remove([f"{left.id}/consent.json"])  # whoever removed it came no further
    (tmp_path / left.id / "consent.json").unlink(missing_ok=True)
    for consent_id in (left.id, left.id, "cons_" + "0" * 24, "../" + whole.id, ""):
        with pytest.raises(VoiceNotFound):
            await store.remove(consent_id)
    assert {name.partition("/")[0] for name in names_at(memory)} == ({whole.id} if place == "bucket" else set())
    assert os.listdir(tmp_path) == ([whole.id] if place == "folder" else [])
    assert await store.all() == [whole]
    store.close()


@pytest.mark.parametrize("place", ["folder", "bucket"])
async def test_of_a_consent_whose_record_is_refused_nothing_stays(
    place: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ConsentStore(tmp_path if place == "folder" else memory, 2, 100, 10)
    kind, write = type(store._files), type(store._files).write

    def full(files: Any, name: str, content: bytes) -> None:
        if name.endswith(".json"):
            raise StorageFailure("full")
        write(files, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "write", full)
        with pytest.raises(StorageFailure):
            await store.add("name", "en", b"recording")
    assert names_at(memory) == os.listdir(tmp_path) == await store.all() == []
    store.close()


@pytest.mark.parametrize("place", ["folder", "bucket"])
async def test_a_recording_whose_process_has_died_goes_with_a_later_consent(place: str, tmp_path: Path) -> None:
    with a_bucket("shelf", tmp_path) as url:
        store = ConsentStore(tmp_path / "own" if place == "folder" else url, 2, 100, 10)
        dead, writing = (f"cons_{digit * 24}/recording" for digit in "01")
        for name in (dead, writing, "cons_other/recording"):
            store._files.write(name, b"recording")
        grow_old(tmp_path, but="1" * 24)
        consent = await store.add("name", "en", b"recording")
        left = {item.name for item in store._files.items()}
        assert left == {writing, "cons_other/recording", f"{consent.id}/consent.json", f"{consent.id}/recording"}
        assert await store.all() == [consent]
        store.close()


async def test_consents_lie_beside_voices_also_where_the_url_ends_with_a_slash(memory: str, tiny_folder: Path) -> None:
    synthesizer = Synthesizer(tiny_folder, SteadySpeaker(), voices=VoicesConfig(f"{memory}/"))
    consent = await synthesizer.consents.add("name", "en", b"recording")
    assert names_at(memory) == [f"consents/{consent.id}/consent.json", f"consents/{consent.id}/recording"]
    await synthesizer.close()
