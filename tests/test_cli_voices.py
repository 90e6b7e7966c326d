"""`duetts voices`, run as a person runs it, and what a server and the Python door make of such a voice."""

import os
from pathlib import Path

import pytest

from duetts import TTS
from duetts.config import VoicesConfig
from duetts.errors import InvalidRequest
from duetts.voices.store import VoiceStore

from .inputs import INPUTS, REF_TEXT
from .test_cli import duetts_here

CLIP = INPUTS / "audio" / "control_pcm16.wav"


def voices(folder: Path | str, *arguments: str) -> tuple[int, str, str]:
    run = duetts_here("voices", *arguments, DUETTS_VOICES_DIR=str(folder), COLUMNS="200")
    assert "Traceback" not in run.stderr
    return run.returncode, run.stdout, run.stderr


def test_add_list_replace_and_remove(tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    assert voices(folder, "list") == (0, "", "")
    assert not folder.exists()
    code, shown, _ = voices(folder, "add", "Anna", "--audio", str(CLIP), "--text", "Words.", "--consent", "c-7")
    assert code == 0
    assert "Anna: 4.0 s" in shown
    code, _, message = voices(folder, "add", "ANNA", "--audio", str(CLIP), "--text", REF_TEXT)
    assert code == 1
    assert "--replace" in message
    assert voices(folder, "add", "ANNA", "--audio", str(CLIP), "--text", REF_TEXT, "--replace")[0] == 0
    assert voices(tmp_path / "elsewhere", "list", "--voices-dir", str(folder))[1].startswith("ANNA")
    found = VoiceStore(folder, 9, 9).find("anna")
    assert found is not None
    assert (found.voice.transcript, found.audio(), found.codes("any")) == (REF_TEXT, CLIP.read_bytes(), None)
    assert voices(folder, "rm", "anna")[0] == 0
    code, _, message = voices(folder, "rm", "anna")
    assert (code, "no voice" in message) == (1, True)
    assert os.listdir(folder) == []


def test_an_object_store_in_the_place_of_a_folder(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/voices"  # of this process, in which the command runs
    assert voices(url, "list") == (0, "", "")
    code, shown, _ = voices(url, "add", "Anna", "--audio", str(CLIP), "--text", "Words.")
    assert (code, url in shown) == (0, True)
    assert voices(tmp_path, "list", "--voices-dir", url)[1].startswith("Anna")
    assert voices(url, "rm", "anna")[0] == 0
    assert voices(url, "list") == (0, "", "")
    code, _, message = voices("nosuch://bucket", "list")
    assert (code, "nosuch:// cannot be used here" in message) == (2, True)


@pytest.mark.parametrize(
    ("name", "audio", "text", "words"),
    [
        ("../x", CLIP, "Words.", "slashes"),
        ("default", CLIP, "Words.", "reserved"),
        ("Anna", CLIP, " ", "text is empty"),
        ("Anna", CLIP, "<|im_end|>", "control token"),
        ("Anna", INPUTS / "audio" / "sixty_seconds.mp3", "Words.", "at most 30 s"),
        ("Anna", INPUTS / "ref_text.txt", "Words.", "not audio"),
        ("Anna", INPUTS / "missing.wav", "Words.", "No such file"),
        ("Anna", Path("/dev/zero"), "Words.", "more than"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, audio: Path, text: str, words: str) -> None:
    code, _, message = voices(tmp_path, "add", name, "--audio", str(audio), "--text", text)
    assert code == 1
    assert words in message
    assert os.listdir(tmp_path) == []


def test_a_voice_added_offline_speaks_in_python_and_by_command(tiny_folder: Path, tmp_path: Path) -> None:
    voices(tmp_path / "voices", "add", "Anna", "--audio", str(CLIP), "--text", REF_TEXT)
    config = VoicesConfig(tmp_path / "voices")
    with TTS(tiny_folder, device="cpu", voices=config) as tts:
        by_name = tts.say("Hi there.", voice="anna", seed=3)
        by_clip = tts.say("Hi there.", reference=CLIP, reference_text=REF_TEXT, seed=3)
        assert by_name.pcm == by_clip.pcm != tts.say("Hi there.", seed=3).pcm
        with pytest.raises(InvalidRequest, match="default, Anna"):
            tts.say("Hi there.", voice="bert")
    with TTS(tiny_folder, device="cpu", voices=VoicesConfig(tmp_path / "voices", "anna")) as tts:
        assert tts.say("Hi there.", seed=3).pcm == by_name.pcm
    output = tmp_path / "x.wav"
    say = ["say", "Hi there.", "--model", str(tiny_folder), "--device", "cpu", "--seed", "3", "-o", str(output)]
    assert duetts_here(*say, "--voice", "ANNA", DUETTS_VOICES_DIR=str(tmp_path / "voices")).returncode == 0
    assert output.read_bytes()[44:] == by_name.pcm
    unknown = duetts_here(*say, "--voice", "bert", DUETTS_VOICES_DIR=str(tmp_path / "voices"))
    assert (unknown.returncode, "unknown" in unknown.stderr) == (1, True)
