"""Small samples of every voice that ships: `python -m training.samples [--model FOLDER] [--out docs/samples]`.

Asks a server of its own, over HTTP, for one sentence in the default voice and another in each preset, as Opus with a fixed
seed, and writes a table of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from training.judge.serving import Server, served
from training.report import say

SEED = 7
BIT_RATE = 32  # kbit/s
DEFAULT, DEFAULT_TEXT = "default", "Good evening. This is how I sound when nobody asks for somebody else."
TEXTS = (
    "The first snow of the year fell during the night, and nobody heard it.",
    "If you take the small path behind the church, you will see the sea.",
    "There are three apples in the basket, and one of them is for you.",
    "Please leave your shoes at the door and come in, the tea is ready.",
    "I have never been to the mountains, but I know all their names.",
    "The bus stops here every hour, unless it rains, and then it does not.",
    "He counted the boats in the harbor twice, and one was still missing.",
    "What a lovely garden! Did you plant all of these roses yourself?",
)
HEAD = """# How duetts-mini sounds

Made by `python -m training.samples` with the weights that ship: one answer of the API for each voice, seed {seed}, nothing
chosen by ear. All voices are synthetic; [the model's card](../../src/duetts/mini/README.md) tells where they are from.

| voice | what is said | file |
|---|---|---|
"""


def record(server: Server, voice: str, text: str, path: Path) -> str:
    """Writes a sample; returns its row of the table."""
    fields: dict[str, Any] = {"voice": voice, "response_format": "opus", "bitrate": BIT_RATE}
    audio, answer = server.speak(text, SEED, **fields)
    path.write_bytes(audio)
    say(f"{path.name}: {answer['duration_s']:.1f} s, {len(audio)} bytes")
    return f"| {voice} | {text} | [{path.name}]({path.name}) |\n"


def record_all(server: Server, out: Path) -> None:
    """The default voice and all presets. Raises `SystemExit` if the model is not trained."""
    if server.about()["weights"] != "trained":
        raise SystemExit("this model is not trained: samples of noise are of no use")
    out.mkdir(parents=True, exist_ok=True)
    rows = [record(server, DEFAULT, DEFAULT_TEXT, out / f"{DEFAULT}.opus")]
    for index, name in enumerate(server.presets()):
        rows.append(record(server, name, TEXTS[index % len(TEXTS)], out / f"{name}.opus"))
    (out / "README.md").write_text(HEAD.format(seed=SEED) + "".join(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="model folder; without it duetts-mini")
    parser.add_argument("--out", type=Path, default=Path("docs/samples"))
    options = parser.parse_args()
    with served(options.model) as address, Server(address) as server:
        server.wait()
        record_all(server, options.out)


if __name__ == "__main__":
    main()
