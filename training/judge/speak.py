"""What the server says for every gate: `python -m training.judge.speak --out DIR [--model FOLDER | --url URL]`.

Starts `duetts serve` on a free port, or asks one that runs, and writes sets of sound files (`training.judge.sets`) for the
judges: the default voice, clones of held-out voices, a story, with `--originals` the codec's round trip; and measures speed
first, while nothing else runs. Every sentence has its own fixed seed. What is there is not asked for again; a folder belongs to
one model.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from duetts.tts import resolve_model
from training.judge.originals import HEART, cloning_lines
from training.judge.references import FOLDER as REFERENCES
from training.judge.references import clip_path
from training.judge.sentences import read_sentences
from training.judge.serving import Server, served
from training.judge.sets import ORIGINAL, ROUND_TRIP, SPOKEN, Line, read_json, read_lines, write_json, write_lines
from training.report import say

DEFAULT_VOICE, CLONES, CODEC, STORY, SPEED, MODEL = "default", "clones", "codec", "story", "speed.json", "model.json"
STORY_FILE = Path(__file__).parents[2] / "tests" / "data" / "story.txt"
TIMED_SENTENCE = "The amount of fluid that flows in a given time."
TIMED_REQUESTS, WARM_UP = 20, 3
SEEDS = {DEFAULT_VOICE: 1000, CLONES: 2000, STORY: 3000}

Speak = Callable[[Line, int], tuple[bytes, dict[str, Any]]]


def write_set(folder: Path, lines: list[Line], first_seed: int, speak: Speak, take: str = SPOKEN) -> None:
    """Asks for every line that is not there yet; what the server said of it goes into `answers.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder, lines)
    answers = read_json(folder / "answers.json")
    for seed, line in enumerate(lines, first_seed):
        path = folder / f"{line.name}-{take}.wav"
        if path.exists() and path.name in answers:
            continue
        audio, answers[path.name] = speak(line, seed)
        path.write_bytes(audio)
        write_json(folder / "answers.json", answers)
    say(f"{folder.name}: {len(lines)} files")


def default_lines() -> list[Line]:
    return [Line(f"{number:03d}", text, DEFAULT_VOICE) for number, text in enumerate(read_sentences())]


def write_clones(server: Server, folder: Path) -> None:
    """Held-out voices, each from its clip."""
    references = {
        line.name: {"audio": base64.b64encode(clip_path(line.name).read_bytes()).decode(), "text": line.text}
        for line in read_lines(REFERENCES)
    }

    def speak(line: Line, seed: int) -> tuple[bytes, dict[str, Any]]:
        return server.speak(line.text, seed, references=[references[line.speaker]])

    write_set(folder, cloning_lines(read_sentences()), SEEDS[CLONES], speak)


def write_round_trips(server: Server, folder: Path, originals: Path) -> None:
    """The default voice's originals through the codec. The originals are linked to, as takes of the same lines."""

    def pass_through(line: Line, seed: int) -> tuple[bytes, dict[str, Any]]:
        original = originals / f"{line.name}-{ORIGINAL}.wav"
        link = folder / original.name
        if not link.exists():
            link.symlink_to(original.resolve())
        return server.round_trip(original.read_bytes()), {}

    write_set(folder, read_lines(originals), 0, pass_through, ROUND_TRIP)


def measure_speed(server: Server, path: Path) -> None:
    """One sentence again and again, alone; the first ones, which also pay for the allocator, do not count."""
    if path.exists():
        return
    load = os.getloadavg()[0]
    found = [server.stream(TIMED_SENTENCE, seed) for seed in range(WARM_UP + TIMED_REQUESTS)][WARM_UP:]
    firsts, factors = zip(*found, strict=True)
    values = {
        "first_audio_ms": round(1000 * statistics.median(firsts), 1),
        "first_audio_ms_worst": round(1000 * max(firsts), 1),
        "rtf": round(statistics.median(factors), 3),
        "rtf_worst": round(max(factors), 3),
        "requests": TIMED_REQUESTS,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 2),
    }
    write_json(path, values)
    say(f"speed: {values}")


def describe(server: Server, model: Path | None) -> dict[str, Any]:
    """What is judged: the server's words, and its weights if they are at hand."""
    about = server.about()
    found = {key: about.get(key) for key in ("version", "model", "weights", "device", "dtype", "codec_id")}
    files = sorted(model.glob("*.safetensors")) if model else []
    if files:
        found["weights_bytes"] = sum(path.stat().st_size for path in files)
        found["sha256"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return found


def claim(path: Path, found: dict[str, Any]) -> None:
    """Raises `SystemExit` if the folder is another model's."""
    before = read_json(path)
    if before and any(before.get(key) != found.get(key) for key in ("sha256", "codec_id", "weights", "voice")):
        raise SystemExit(f"{path.parent} has what another model said; take another folder")
    write_json(path, found)


def speak_all(server: Server, out: Path, model: Path | None, originals: Path | None, voice: str = "default") -> None:
    server.wait()
    out.mkdir(parents=True, exist_ok=True)
    claim(out / MODEL, describe(server, model) | {"voice": voice})
    measure_speed(server, out / SPEED)

    def plain(line: Line, seed: int) -> tuple[bytes, dict[str, Any]]:
        return server.speak(line.text, seed, voice=voice)

    write_set(out / DEFAULT_VOICE, default_lines(), SEEDS[DEFAULT_VOICE], plain)
    write_set(out / STORY, [Line(STORY, STORY_FILE.read_text(encoding="utf-8"), DEFAULT_VOICE)], SEEDS[STORY], plain)
    write_clones(server, out / CLONES)
    if originals is not None:
        write_round_trips(server, out / CODEC, originals / HEART)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--model", type=Path, help="model folder; without it duetts-mini")
    parser.add_argument("--url", help="a server that runs, in the place of one that is started")
    parser.add_argument("--originals", type=Path, help="folder of training.judge.originals")
    parser.add_argument("--voice", default="default", help="who speaks for the default voice; none is the bare model")
    options = parser.parse_args()
    model = options.model or (None if options.url else resolve_model(None))
    with nullcontext(options.url) if options.url else served(options.model) as address, Server(address) as server:
        speak_all(server, options.out, model, options.originals, options.voice)


if __name__ == "__main__":
    main()
