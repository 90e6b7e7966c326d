"""Voices by name: what is encoded when, which default speaks, and what others may do meanwhile."""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from duetts.config import Limits, VoicesConfig
from duetts.errors import ConfigError, EngineFailure, InvalidRequest, Overloaded, ProtectedVoice, VoiceExists, VoiceNotFound
from duetts.types import Float32, Int32, SpeakerInfo, Voice, VoiceDraft
from duetts.voices.library import SpokenClip, SpokenVoice, VoiceLibrary, media_type
from duetts.voices.reference import ReferenceCodes
from duetts.voices.store import RECORD, VoiceStore
from tests.inputs import REF_TEXT, REFUSED_CLIPS, clip, clips
from tests.waiting import until

RATE, FRAME = 44100, 2048
CLIP = clip("control_pcm16.wav")
OTHER = clip("tel_8k_mulaw.wav")


@dataclass
class Bench:
    """A library and what stands behind it: a codec that counts, and a text side that speaks clips of noise."""

    folder: Path
    weights: str = "trained"
    codec_id: str = "codec"
    default_voice: str = "none"
    aliases: tuple[tuple[str, str], ...] = ()
    max_voices: int = 10
    encoded: int = 0
    asked: list[int] = field(default_factory=list)  # seeds of clips
    bad_seeds: tuple[int, ...] = ()
    failure: Exception | None = None

    def __post_init__(self) -> None:
        limits = Limits()
        info = SpeakerInfo("fake", RATE, FRAME, 4, 1024, weights=self.weights, codec_id=self.codec_id)
        self.references = ReferenceCodes(self.encode, RATE, limits)
        config = VoicesConfig(self.folder / "stored", self.default_voice, self.aliases, max_voices=self.max_voices)
        self.library = VoiceLibrary(config, self.folder / "presets", info, self.references, self)

    async def encode(self, wave: Float32) -> Int32:
        self.encoded += 1
        if self.failure is not None:
            raise self.failure
        return np.full((4, -(-len(wave) // FRAME)), len(self.codec_id), np.int32)

    def clean_transcript(self, text: str | None) -> str:
        if not text:
            raise InvalidRequest("missing", field="ref_text", code="reference_text_required")
        return text

    def check_room(self, codes: Int32, transcript: str) -> None:
        if len(transcript) > 1000:
            raise InvalidRequest("no room", field="ref_text", code="context_length_exceeded")

    async def speak_clip(self, seed: int) -> SpokenClip | None:
        self.asked.append(seed)
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        noise = np.random.default_rng(seed).integers(-9000, 9000, 100 * FRAME).astype("<i2")
        return None if seed in self.bad_seeds else SpokenClip(noise.tobytes(), np.full((4, 100), seed % 100, np.int32), "Said.")

    async def choose(self, name: str = "", field: str = "voice", or_default: bool = False) -> SpokenVoice | None:
        return await self.library.choose(name, field, or_default)

    async def add(self, name: str = "Anna", audio: bytes = CLIP, text: str | None = REF_TEXT, replace: bool = False) -> Voice:
        return await self.library.add(VoiceDraft(name, audio, text), replace=replace)


def preset(folder: Path, name: str, default: bool = False, codec: str = "codec") -> None:
    """A voice in the folder of a model."""
    voice = Voice(name, f"{name} says.", 1, 2.0, len(CLIP), "audio/wav", "preset")
    stored = VoiceStore(folder / "presets", 99, 1 << 30).add(voice, CLIP, codec, np.full((4, 7), 9, np.int32), replace=False)
    record = stored.folder / RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), "default": default}))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("duetts").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("duetts").setLevel(logging.NOTSET)


async def test_a_voice_is_encoded_once_for_good(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    voice = await first.add()
    assert (voice.name, voice.media_type, voice.num_bytes, voice.transcript) == ("Anna", "audio/wav", len(CLIP), REF_TEXT)
    spoken = [await first.choose(name) for name in ["anna", "ANNA", " Anna "] * 100]
    assert first.encoded == 1
    assert {one.transcript for one in spoken} == {REF_TEXT}
    assert all(one.hit and not one.codes.flags.writeable for one in spoken)
    later = Bench(tmp_path)
    again = await later.choose("anna")
    assert again is not None
    assert again.hit
    assert np.array_equal(again.codes, spoken[0].codes)
    assert (later.encoded, later.references.num_decoded) == (0, 0)
    assert (later.library.hits, later.library.misses) == (1, 0)


async def test_another_codec_encodes_a_voice_anew_and_keeps_both(tmp_path: Path) -> None:
    await Bench(tmp_path).add()
    other = Bench(tmp_path, codec_id="another")
    spoken = [await other.choose("anna") for _ in range(3)]
    assert [one.hit for one in spoken] == [False, True, True]
    assert other.encoded == 1
    assert int(spoken[0].codes[0, 0]) == len("another")
    written = other.library._store.find("anna")
    assert written is not None
    await until(lambda: written.codes("another") is not None)  # what is kept is written behind
    for codec in ("codec", "another"):
        bench = Bench(tmp_path, codec_id=codec)
        assert int((await bench.choose("anna")).codes[0, 0]) == len(codec)
        assert bench.encoded == 0


async def test_a_thousand_requests_at_once_find_their_voices(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.add("Anna")
    await bench.add("Bert", OTHER)
    spoken = await asyncio.gather(*(bench.choose(("anna", "bert")[index % 2]) for index in range(1000)))
    assert [one.name for one in spoken[:2]] == ["Anna", "Bert"]
    assert bench.encoded == 2


async def test_requests_at_once_encode_a_voice_once(tmp_path: Path) -> None:
    await Bench(tmp_path).add()
    other = Bench(tmp_path, codec_id="another")
    spoken = await asyncio.gather(*(other.choose("anna") for _ in range(32)))
    assert other.encoded == 1
    assert len({id(one.codes) for one in spoken}) == 1


async def test_whoever_speaks_keeps_the_voice_that_is_replaced_or_removed(tmp_path: Path) -> None:
    one, two = Bench(tmp_path), Bench(tmp_path)
    await one.add()
    before = await one.choose("anna")
    await two.add(audio=OTHER, text="Other words.", replace=True)
    after = await one.choose("anna")
    assert (before.transcript, after.transcript) == (REF_TEXT, "Other words.")
    assert before.codes.flags.writeable is False
    await two.library.remove("anna")
    with pytest.raises(InvalidRequest):
        await one.choose("anna")
    assert before.codes.shape == (4, 87)


@pytest.mark.parametrize(
    ("audio", "text", "code"),
    [
        *((clip(name), REF_TEXT, code) for name, code in REFUSED_CLIPS.items()),
        (CLIP, None, "reference_text_required"),
        (CLIP, "", "reference_text_required"),
        (CLIP, "x" * 1001, "context_length_exceeded"),
        (b"x" * (11 << 20), REF_TEXT, "reference_too_large"),
    ],
)
async def test_what_is_wrong_replaces_nothing(tmp_path: Path, audio: bytes, text: str | None, code: str) -> None:
    bench = Bench(tmp_path)
    await bench.add()
    with pytest.raises(InvalidRequest) as refusal:
        await bench.add(audio=audio, text=text, replace=True)
    assert refusal.value.code == code
    assert refusal.value.field in ("audio_sample", "ref_text")
    assert (await bench.choose("anna")).transcript == REF_TEXT


async def test_a_codec_that_fails_replaces_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.add()
    bench.failure = EngineFailure("lost")
    with pytest.raises(EngineFailure):
        await bench.add(audio=OTHER, replace=True)
    assert (await bench.choose("anna")).transcript == REF_TEXT


async def test_a_taken_name_costs_no_encoding(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.add()
    with pytest.raises(VoiceExists):
        await bench.add("ANNA", OTHER)
    assert bench.encoded == 1


async def test_of_many_uploads_of_one_name_one_wins(tmp_path: Path) -> None:
    benches = [Bench(tmp_path) for _ in range(8)]
    tries = await asyncio.gather(*(bench.add(text=str(i)) for i, bench in enumerate(benches)), return_exceptions=True)
    won = [index for index, result in enumerate(tries) if isinstance(result, Voice)]
    assert len(won) == 1
    assert all(isinstance(result, VoiceExists) for index, result in enumerate(tries) if index not in won)
    assert (await benches[0].choose("anna")).transcript == str(won[0])


async def test_unknown_voices_name_those_that_exist_and_not_too_many(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_voices=99)
    await bench.add("Zoe")
    with pytest.raises(InvalidRequest) as refusal:
        await bench.choose("bert", "speaker")
    assert (refusal.value.code, refusal.value.field) == ("unknown_voice", "speaker")
    assert "default, Zoe" in refusal.value.message
    for index in range(30):
        await bench.add(f"voice {index:02}")
    with pytest.raises(InvalidRequest) as refusal:
        await bench.choose("x" * 100_000)
    assert "and 12 more" in refusal.value.message
    assert len(refusal.value.message) < 600


@pytest.mark.parametrize("name", ["../anna", "anna/.", "a\0", "..", "\ud800", "%00", "anna-0", "stored", "presets"])
async def test_names_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    bench = Bench(tmp_path)
    await bench.add()
    with pytest.raises(InvalidRequest):
        await bench.choose(name)
    for act in (bench.library.get, bench.library.remove, bench.library.audio):
        with pytest.raises(VoiceNotFound):
            await act(name)
    assert await bench.choose("anna")


async def test_clips_are_not_given_away_unless_allowed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.add()
    with pytest.raises(ProtectedVoice):
        await bench.library.audio("anna")


# -- presets


async def test_presets_speak_without_a_store_and_cannot_be_changed(tmp_path: Path) -> None:
    preset(tmp_path, "Bert")
    preset(tmp_path, "Anna", default=True)
    bench = Bench(tmp_path, default_voice="auto")
    await bench.library.prepare()
    assert bench.library.default_name == "Anna"
    assert [voice.name for voice in await bench.library.all()] == ["Anna", "Bert"]
    assert (await bench.choose("")).name == (await bench.choose("default")).name == "Anna"
    assert (await bench.choose("BERT")).transcript == "Bert says."
    assert bench.encoded == 0
    assert not (tmp_path / "stored").exists()
    for act in (bench.library.remove("bert"), bench.library.remove("anna")):
        with pytest.raises(ProtectedVoice):
            await act
    with pytest.raises(InvalidRequest) as refusal:
        await bench.add("bert", replace=True)
    assert refusal.value.field == "name"


async def test_presets_of_another_codec_are_encoded_anew(tmp_path: Path) -> None:
    preset(tmp_path, "Anna", codec="older codec")
    bench = Bench(tmp_path, default_voice="auto")
    before = {path.name for path in (tmp_path / "presets").rglob("*")}
    assert int((await bench.choose()).codes[0, 0]) == len("codec")
    assert bench.encoded == 1
    await asyncio.sleep(0.2)
    assert {path.name for path in (tmp_path / "presets").rglob("*")} == before, "a model's folder is not written to"


async def test_a_stored_voice_hides_a_preset_that_came_later(tmp_path: Path) -> None:
    await Bench(tmp_path).add("Anna")
    preset(tmp_path, "anna")
    bench = Bench(tmp_path)
    assert (await bench.choose("anna")).transcript == REF_TEXT
    assert [voice.origin for voice in await bench.library.all()] == ["stored"]
    await bench.library.remove("anna")
    assert (await bench.choose("anna")).transcript == "anna says."


# -- the default voice


async def test_none_is_the_bare_model(tmp_path: Path) -> None:
    preset(tmp_path, "Anna")
    for default in ("none", "None"):
        bench = Bench(tmp_path, default_voice=default)
        await bench.library.prepare()
        assert bench.library.default_name == "none"
        assert await bench.choose() is None
    with_default = Bench(tmp_path, default_voice="auto")
    assert await with_default.choose("none") is None
    assert await with_default.choose("default") is not None


@pytest.mark.parametrize("weights", ["untrained", "dummy"])
async def test_weights_that_cannot_speak_make_no_clip(tmp_path: Path, weights: str) -> None:
    bench = Bench(tmp_path, weights, default_voice="auto")
    assert await bench.choose() is None
    assert bench.asked == []
    asked_for = Bench(tmp_path, weights, default_voice="seed:5")
    assert await asked_for.choose() is not None
    assert asked_for.asked == [5]


async def test_a_stored_voice_is_the_default_by_name_and_cannot_be_removed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, default_voice="anna")
    with pytest.raises(ConfigError, match="anna"):
        await bench.library.prepare()
    await bench.add("Anna")
    await bench.library.prepare()
    assert (await bench.choose()).name == "Anna"
    with pytest.raises(ProtectedVoice):
        await bench.library.remove("ANNA")
    elsewhere = Bench(tmp_path)
    await elsewhere.library.remove("anna")
    assert (await bench.choose("default")).transcript == REF_TEXT
    with pytest.raises(InvalidRequest):
        await bench.choose("anna")


async def test_the_model_speaks_its_default_once_and_for_all_processes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, default_voice="auto")
    spoken = await asyncio.gather(*(bench.choose() for _ in range(8)))
    assert bench.asked == [0]
    assert len({one.codes.tobytes() for one in spoken}) == 1
    assert spoken[0].transcript == "Said."
    voice = await bench.library.get(bench.library.default_name)
    assert voice.origin == "generated"
    assert voice.duration_s == pytest.approx(100 * FRAME / RATE)
    later = Bench(tmp_path, default_voice="auto")
    again = await later.choose()
    assert np.array_equal(again.codes, spoken[0].codes)
    assert (later.asked, later.encoded) == ([], 0)
    other_seed = Bench(tmp_path, default_voice="seed:7")
    assert not np.array_equal((await other_seed.choose()).codes, spoken[0].codes)
    with pytest.raises(ProtectedVoice):
        await other_seed.library.remove(other_seed.library.default_name)
    await other_seed.library.remove(bench.library.default_name)
    with pytest.raises(InvalidRequest):
        await bench.add(bench.library.default_name)


async def test_of_two_processes_that_make_the_default_the_first_counts(tmp_path: Path) -> None:
    one, two = Bench(tmp_path, default_voice="seed:1"), Bench(tmp_path, default_voice="seed:1")
    speak = two.speak_clip

    async def late(seed: int) -> SpokenClip | None:
        await one.choose()
        clip = await speak(seed)
        return clip and SpokenClip(clip.pcm, clip.codes + 1, clip.text)

    two.speak_clip = late  # type: ignore[method-assign]
    assert np.array_equal((await two.choose()).codes, (await one.choose()).codes)


async def test_clips_that_go_wrong_are_tried_with_other_seeds_then_given_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, default_voice="auto", bad_seeds=(0, 1_000_003))
    assert await bench.choose() is not None
    assert bench.asked == [0, 1_000_003, 2_000_006]
    mute = Bench(tmp_path / "mute", default_voice="auto", bad_seeds=tuple(i * 1_000_003 for i in range(9)))
    assert await mute.choose() is None
    assert mute.library.default_name == "none"
    assert await mute.choose() is None
    assert len(mute.asked) == 4


async def test_a_full_engine_is_no_reason_to_give_up_the_default(tmp_path: Path) -> None:
    bench = Bench(tmp_path, default_voice="auto", failure=Overloaded("full", retry_after_s=1))
    await bench.library.prepare()
    with pytest.raises(Overloaded):
        await bench.choose()
    bench.failure = None
    assert await bench.choose() is not None


async def test_a_default_that_cannot_be_stored_lives_in_memory(tmp_path: Path) -> None:
    (tmp_path / "stored").write_text("no folder")
    bench = Bench(tmp_path, default_voice="auto")
    first = await bench.choose()
    assert await bench.choose() is first
    assert bench.asked == [0]


async def test_a_default_removed_by_hand_goes_on_and_comes_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, default_voice="auto")
    first = await bench.choose()
    assert VoiceStore(tmp_path / "stored", 9, 9).remove(bench.library.default_name)
    assert (await bench.choose()).codes.tobytes() == first.codes.tobytes()
    later = Bench(tmp_path, default_voice="auto")
    assert (await later.choose()).codes.tobytes() == first.codes.tobytes()
    assert later.asked == [0]


# -- other names


async def test_aliases_and_fallbacks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, default_voice="auto", aliases=(("Alloy", "anna"), ("ash", "gone")))
    await bench.add("Anna")
    assert (await bench.choose("alloy")).name == "Anna"
    default = await bench.choose()
    assert (await bench.choose("ash", or_default=True)).name == default.name
    assert (await bench.choose("nova", or_default=True)).name == default.name
    with pytest.raises(InvalidRequest):
        await bench.choose("ash")
    await bench.add("alloy", OTHER, "Own words.")
    assert (await bench.choose("ALLOY")).transcript == "Own words."


@pytest.mark.parametrize("row", clips(), ids=lambda row: row["file"].removeprefix("audio/"))
def test_kinds_of_files(row: dict[str, object]) -> None:
    name = str(row["file"]).removeprefix("audio/")
    kinds = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "ogg": "audio/ogg", "opus": "audio/ogg",
             "webm": "audio/webm", "m4a": "audio/mp4", "mp4": "audio/mp4", "aac": "audio/aac"}  # fmt: skip
    content = clip(name)
    if name not in REFUSED_CLIPS and name != "mp3_named.wav":
        assert media_type(content) == kinds[name.rsplit(".", 1)[1]]
    assert media_type(clip("mp3_named.wav")) == "audio/mpeg"
    assert media_type(b"") == media_type(b"text") == "application/octet-stream"
