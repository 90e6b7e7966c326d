"""Voices on disk: whole at any moment, bounded, shared by processes, and never outside their folder."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetts.config import voices_folder
from duetts.errors import CheckpointError, InvalidRequest, StorageFailure, VoiceExists
from duetts.types import Voice
from duetts.voices.folder import WRITING
from duetts.voices.names import FOLDER_NAME, clean_name, folder_name, name_key
from duetts.voices.store import RECORD, REMOVED, VoiceStore, read_presets, read_voice
from tests.waiting import LIMIT_S

CODES = np.arange(40, dtype=np.int32).reshape(4, 10)
MEGABYTE = 1 << 20


def a_voice(name: str = "Anna", audio: bytes = b"clip", **fields: object) -> Voice:
    return replace(Voice(name, "What is said.", 1_764_470_000, 4.2, len(audio), "audio/wav"), **fields)


def a_store(folder: Path, max_voices: int = 10, max_bytes: int = MEGABYTE) -> VoiceStore:
    return VoiceStore(folder, max_voices, max_bytes)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- names


@pytest.mark.parametrize(
    "name",
    [
        "", " ", "\t", "a/b", "a\\b", "..", ".", "...", "../../etc/passwd", "a\0b", "\0", "a\nb", "a\x7fb", "\ud800", "x" * 65,
        "x" * 10_000, "-", "🙂", "\u200b", "\u202eabc", "default", "DEFAULT", " Default ", "none", "auto", "seed:7", "Seed-7-x",
        "ｄｅｆａｕｌｔ", "a\u2028b",
    ],
)  # fmt: skip
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        clean_name(name)
    assert refusal.value.field == "name"
    assert len(refusal.value.message) < 200


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Anna", "Anna"), ("  Anna  B. ", "Anna B."), ("a.b", "a.b"), ("CON", "CON"), ("Zoë", "Zoë"), ("Zoe\u0308", "Zoë"),
        ("%2e%2e%2f", "%2e%2e%2f"), ("山田 太郎", "山田 太郎"), ("a\u00a0b", "a b"), ("x" * 64, "x" * 64), ("alloy", "alloy"),
        ("voice.json", "voice.json"), ("🙂1", "🙂1"), (".hidden", ".hidden"), ("~root", "~root"), ("$HOME", "$HOME"),
    ],
)  # fmt: skip
def test_names_and_how_they_are_shown(name: str, shown: str) -> None:
    assert clean_name(name) == shown
    assert FOLDER_NAME.fullmatch(folder_name(name))


@pytest.mark.parametrize(
    "spellings",
    [["Anna", "ANNA", "anna", " anna ", "Ａｎｎａ"], ["Zoë", "zoe\u0308", "ZOË"], ["straße", "STRASSE"], ["ﬁ", "fi"]],
)
def test_spellings_of_one_name_are_one_key_and_one_folder(spellings: list[str]) -> None:
    assert len({name_key(spelling) for spelling in spellings}) == 1
    assert len({folder_name(spelling) for spelling in spellings}) == 1


@given(st.text(max_size=80))
def test_any_text_is_a_name_or_is_refused(text: str) -> None:
    try:
        shown = clean_name(text)
    except InvalidRequest:
        return
    assert clean_name(shown) == shown
    assert folder_name(shown) == folder_name(text)
    assert not {"/", "\\", "\0"} & set(shown)
    assert FOLDER_NAME.fullmatch(folder_name(text))


def test_different_names_have_different_folders() -> None:
    names = ["a b", "a-b", "a_b", "ab", "a.b", "a:b", "é", "e", "x" * 63, "x" * 64, "%2e", ".e"]
    assert len({folder_name(name) for name in names}) == len(names)


# -- keeping


def test_a_voice_comes_back_as_it_was_from_another_store(tmp_path: Path) -> None:
    voice = a_voice(consent="c-1", description="calm", language="en", tags="a, b", origin="generated")
    a_store(tmp_path).add(voice, b"clip", "codec", CODES, replace=False)
    found = a_store(tmp_path).find("ANNA")
    assert found is not None
    assert found.voice == voice
    assert found.audio() == b"clip"
    codes = found.codes("codec")
    assert codes is not None
    assert codes.dtype == np.int32
    assert np.array_equal(codes, CODES)
    assert found.codes("another codec") is None


def test_where_voices_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DUETTS_VOICES_DIR", str(tmp_path / "own"))
    assert voices_folder() == tmp_path / "own"
    monkeypatch.delenv("DUETTS_VOICES_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert voices_folder() == tmp_path / "data" / "duetts" / "voices"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert voices_folder() == tmp_path / ".local" / "share" / "duetts" / "voices"


def test_a_user_without_a_folder_of_their_own_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DUETTS_VOICES_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert voices_folder().parts[-4:] == (".local", "share", "duetts", "voices")


def test_a_folder_that_was_never_needed_is_not_made(tmp_path: Path) -> None:
    store = a_store(tmp_path / "deep" / "voices")
    assert store.all() == []
    assert store.find("anna") is None
    assert not store.remove("anna")
    assert not (tmp_path / "deep").exists()
    store.add(a_voice(), b"clip", replace=False)
    assert len(store.all()) == 1
    assert (tmp_path / "deep" / "voices").stat().st_mode & 0o077 == 0


def test_voices_are_listed_by_name(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    for name in ("beta", "Alpha", "Ärger", "gamma"):
        store.add(a_voice(name), b"clip", replace=False)
    assert [stored.voice.name for stored in store.all()] == ["Alpha", "beta", "gamma", "Ärger"]


def test_a_taken_name_is_kept_unless_replaced(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    first = store.add(a_voice(), b"one", "codec", CODES, replace=False)
    with pytest.raises(VoiceExists):
        store.add(a_voice("ANNA"), b"two", replace=False)
    assert first.audio() == b"one"
    second = store.add(a_voice("ANNA", b"second"), b"second", "codec", CODES + 1, replace=True)
    found = store.find("anna")
    assert found is not None
    assert found.voice.name == "ANNA"
    assert found.revision == second.revision != first.revision
    assert found.audio() == b"second"
    assert np.array_equal(found.codes("codec"), CODES + 1)
    with pytest.raises(FileNotFoundError):
        first.audio()
    assert len(names_in(second.folder)) == 3


def test_removing(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.add(a_voice(), b"one", replace=False)
    assert store.remove("aNNa")
    assert not store.remove("anna")
    assert store.all() == []
    assert names_in(tmp_path) == []
    store.add(a_voice(), b"two", replace=False)
    assert store.find("anna") is not None


def test_codes_of_a_few_codecs_are_kept_and_damaged_ones_are_not_believed(tmp_path: Path) -> None:
    stored = a_store(tmp_path).add(a_voice(), b"clip", "codec-0", CODES, replace=False)
    for index in range(1, 7):
        stored.keep_codes(f"codec-{index}", CODES + index)
        for path in stored.folder.glob("codes-*"):
            os.utime(path, (time.time() - 60, path.stat().st_mtime - 60))
    kept = [index for index in range(7) if stored.codes(f"codec-{index}") is not None]
    assert kept == [3, 4, 5, 6]
    path = stored._codes_path("codec-6")
    other = stored._codes_path("codec-5")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert stored.codes("codec-6") is None
    path.write_bytes(other.read_bytes())
    assert stored.codes("codec-6") is None
    path.write_bytes(b"")
    assert stored.codes("codec-6") is None


def test_the_numbers_of_voices_and_bytes_are_bounded(tmp_path: Path) -> None:
    store = a_store(tmp_path, max_voices=2, max_bytes=100)
    store.add(a_voice("a", b"x" * 40), b"x" * 40, replace=False)
    with pytest.raises(InvalidRequest) as refusal:
        store.add(a_voice("b", b"x" * 61), b"x" * 61, replace=False)
    assert refusal.value.code == "voice_limit"
    store.add(a_voice("b", b"x" * 60), b"x" * 60, replace=False)
    with pytest.raises(InvalidRequest) as refusal:
        store.add(a_voice("c", b"x"), b"x", replace=False)
    assert refusal.value.code == "voice_limit"
    store.add(a_voice("b", b"x" * 50), b"x" * 50, replace=True)
    with pytest.raises(InvalidRequest):
        store.add(a_voice("b", b"x" * 61), b"x" * 61, replace=True)
    store.add(a_voice("seed-0-1", b"x"), b"x", replace=False, bounded=False)


# -- other processes, other hands


def test_two_stores_on_one_folder_see_each_other_at_once(tmp_path: Path) -> None:
    one, two = a_store(tmp_path), a_store(tmp_path)
    assert two.find("anna") is None
    one.add(a_voice(), b"one", replace=False)
    assert two.find("anna") is not None
    with pytest.raises(VoiceExists):
        two.add(a_voice(), b"two", replace=False)
    two.add(a_voice(), b"two", replace=True)
    found = one.find("anna")
    assert found is not None
    assert found.audio() == b"two"
    assert two.remove("anna")
    assert one.find("anna") is None
    assert one.all() == []


def test_of_many_who_add_one_name_at_once_one_wins(tmp_path: Path) -> None:
    stores = [a_store(tmp_path) for _ in range(16)]

    def add(index: int) -> bool:
        try:
            stores[index].add(a_voice(), b"%d" % index, replace=False)
        except VoiceExists:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = [index for index, did in enumerate(pool.map(add, range(16))) if did]
    assert len(won) == 1
    found = stores[0].find("anna")
    assert found is not None
    assert found.audio() == b"%d" % won[0]
    assert len(names_in(tmp_path)) == 1


def test_while_voices_come_change_and_go_readers_meet_whole_ones(tmp_path: Path) -> None:
    """Eight writers and a reader: whatever is found has the clip and codes of its own revision."""
    end = time.monotonic() + LIMIT_S
    met: list[bytes] = []
    failures: list[str] = []

    def write(index: int) -> None:
        store = a_store(tmp_path)
        turn = 0
        while time.monotonic() < end and len(set(met)) < 20:
            turn += 1
            try:
                if (index + turn) % 3 == 0:
                    store.remove("anna")
                else:
                    number = index * 1000 + turn
                    store.add(
                        a_voice(description=str(number)), b"%d" % number, "codec", CODES * 0 + number % 32768, replace=True
                    )
            except StorageFailure as error:
                failures.append(str(error))

    def read() -> None:
        store = a_store(tmp_path)
        while time.monotonic() < end and len(set(met)) < 20:
            found = store.find("anna")
            if found is None:
                continue
            try:
                audio = found.audio()
            except FileNotFoundError:
                continue  # it was replaced or removed meanwhile
            assert audio.decode() == found.voice.description
            codes = found.codes("codec")
            assert codes is None or int(codes[0, 0]) == int(audio) % 32768
            met.append(audio)

    with ThreadPoolExecutor(9) as pool:
        for work in [pool.submit(write, index) for index in range(8)] + [pool.submit(read)]:
            work.result()
    assert len(set(met)) == 20
    assert not [failure for failure in failures if "keep changing" not in failure]
    found = a_store(tmp_path).find("anna")
    assert found is None or found.audio().decode() == found.voice.description


CRASHER = """
import os, sys
import numpy as np
from pathlib import Path
from duetts.types import Voice
from duetts.voices.store import VoiceStore

folder, what = Path(sys.argv[1]), sys.argv[2]
codes = np.zeros((4, 10), np.int32)

def act(folder):
    store = VoiceStore(folder, 10, 1 << 20)
    if what == "remove":
        store.remove("anna")
    else:
        store.add(Voice("Anna", "New words.", 2, 1.0, 3, "audio/wav"), b"new", "codec", codes, replace=what == "replace")

def child(folder, die_at):
    steps = 0
    def counted(call):
        def counting(*arguments, **options):
            nonlocal steps
            steps += 1
            if steps == die_at:
                os._exit(9)
            return call(*arguments, **options)
        return counting
    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    act(folder)

index = 0
while True:
    process = os.fork()
    if process == 0:
        child(folder / str(index), index + 1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 9:
        break
    index += 1
print(index)
"""


@pytest.mark.parametrize("what", ["add", "replace", "remove"])
def test_a_process_that_dies_at_any_step_leaves_the_old_voice_or_the_new_one(tmp_path: Path, what: str) -> None:
    places = [tmp_path / str(index) for index in range(40)]
    for place in places:
        a_store(place).add(a_voice("Bert"), b"bert", replace=False)
        if what != "add":
            a_store(place).add(a_voice(), b"old", "codec", CODES, replace=False)
    run = subprocess.run([sys.executable, "-c", CRASHER, str(tmp_path), what], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    steps = int(run.stdout)
    assert steps >= (4 if what == "remove" else 8)
    outcomes = set()
    for place in places[:steps]:
        for path in place.rglob(f"{WRITING}*"):
            os.utime(path, (0, 0))
        store = a_store(place)
        found = store.find("anna")
        outcomes.add(found.voice.transcript if found else None)
        if found is not None:
            assert found.audio() == (b"new" if found.voice.transcript == "New words." else b"old")
        bert = store.find("bert")
        assert bert is not None
        assert bert.audio() == b"bert"
        assert not list(place.glob(".*"))
        again = store.add(a_voice(), b"last", "codec", CODES, replace=True)
        assert again.audio() == b"last"
        assert len(names_in(place)) == 2
        assert store.remove("anna")
    expected = {"add": {None, "New words."}, "replace": {"What is said.", "New words."}, "remove": {"What is said.", None}}
    assert outcomes == expected[what]


def test_what_dead_processes_left_is_swept_and_what_living_ones_write_is_not(tmp_path: Path) -> None:
    for name, age_s in ((f"{WRITING}old", 7200), (f"{WRITING}new", 0), (f"{REMOVED}x", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "audio").write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    a_store(tmp_path)
    assert names_in(tmp_path) == [f"{WRITING}new"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda record: record.write_bytes(b""),
    "no object": lambda record: record.write_text("[]"),
    "unknown key": lambda record: record.write_text(json.dumps({**json.loads(record.read_text()), "path": "/etc/passwd"})),
    "another format": lambda record: record.write_text(json.dumps({**json.loads(record.read_text()), "format": 2})),
    "a path as revision": lambda record: record.write_text(json.dumps({**json.loads(record.read_text()), "revision": "../x"})),
    "another's name": lambda record: record.write_text(json.dumps({**json.loads(record.read_text()), "name": "Bert"})),
    "a wrong type": lambda record: record.write_text(json.dumps({**json.loads(record.read_text()), "created_at": "now"})),
    "an unknown origin": lambda record: record.write_text(json.dumps({**json.loads(record.read_text()), "origin": "x"})),
    "gone": lambda record: record.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_voice_is_left_out_and_can_be_replaced_or_removed(tmp_path: Path, damage: str) -> None:
    store = a_store(tmp_path)
    stored = store.add(a_voice(), b"clip", replace=False)
    DAMAGES[damage](stored.folder / RECORD)
    assert store.find("anna") is None
    assert store.all() == []
    with pytest.raises(VoiceExists):
        store.add(a_voice(), b"new", replace=False)
    assert store.add(a_voice(), b"new", replace=True).audio() == b"new"
    found = store.find("anna")
    assert found is not None
    DAMAGES[damage](found.folder / RECORD)
    assert store.remove("anna")
    assert names_in(tmp_path) == []


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "samples").mkdir()
    store = a_store(tmp_path)
    assert store.all() == []
    store.add(a_voice(), b"clip", replace=False)
    assert {"notes.txt", "samples"} < set(names_in(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_serves_and_says_so(tmp_path: Path) -> None:
    a_store(tmp_path).add(a_voice(), b"clip", replace=False)
    for path in (tmp_path, *tmp_path.iterdir()):
        path.chmod(0o500)
    check_unwritable(tmp_path)
    for path in (tmp_path, *tmp_path.iterdir()):
        path.chmod(0o700)


def check_unwritable(folder: Path) -> None:
    store = a_store(folder)
    found = store.find("anna")
    assert found is not None
    found.keep_codes("codec", CODES)
    assert found.codes("codec") is None
    for act in (
        lambda: store.add(a_voice("new"), b"clip", replace=False),
        lambda: store.add(a_voice(), b"clip", replace=True),
        lambda: store.remove("anna"),
    ):
        with pytest.raises(StorageFailure) as failure:
            act()
        assert str(folder) not in str(failure.value)
    assert found.audio() == b"clip"


def test_a_place_where_no_folder_can_be_made_serves_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    store = a_store(tmp_path / "file" / "voices")
    assert store.all() == []
    with pytest.raises(StorageFailure):
        store.add(a_voice(), b"clip", replace=False)


def test_a_disk_that_refuses_in_the_middle_leaves_the_old_voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = a_store(tmp_path)
    store.add(a_voice(), b"old", "codec", CODES, replace=False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            for replacing, label in ((True, "anna"), (False, "new")):
                with pytest.raises(StorageFailure, match="No space left"):
                    store.add(a_voice(label), b"new", "codec", CODES, replace=replacing)
        found = store.find("anna")
        assert found is not None
        assert found.audio() == b"old"
        assert len(names_in(tmp_path)) == 1
        assert len(names_in(found.folder)) == 3


# -- voices that ship with a model


def test_presets(tmp_path: Path) -> None:
    assert read_presets(tmp_path / "none") == []
    store = a_store(tmp_path)
    store.add(a_voice("Bert", origin="preset"), b"bert", replace=False)
    marked = store.add(a_voice("Anna"), b"anna", "codec", CODES, replace=False)
    record = marked.folder / RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), "default": True}))
    (tmp_path / "README.md").write_text("voices")
    marked.folder.rename(tmp_path / "any-name")
    presets = read_presets(tmp_path)
    assert [(p.voice.name, p.voice.origin, p.is_default, p.audio()) for p in presets] == [
        ("Anna", "preset", True, b"anna"), ("Bert", "preset", False, b"bert"),
    ]  # fmt: skip
    assert np.array_equal(presets[0].codes("codec"), CODES)


def test_a_damaged_preset_is_a_damaged_model(tmp_path: Path) -> None:
    stored = a_store(tmp_path).add(a_voice(), b"clip", replace=False)
    assert read_voice(stored.folder).voice.name == "Anna"
    (stored.folder / RECORD).write_text("{}")
    with pytest.raises(CheckpointError, match="format"):
        read_presets(tmp_path)
    (stored.folder / RECORD).unlink()
    with pytest.raises(CheckpointError, match=r"voice\.json"):
        read_presets(tmp_path)
