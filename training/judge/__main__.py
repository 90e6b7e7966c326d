"""Everything at once: `python -m training.judge --out DIR [--model FOLDER | --url URL] [--originals DIR] --judges PYTHON`.

The server is asked by this Python; the judges run in theirs (`make judge` makes it), one after another. Whatever was done
before in the same folder is not done again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from training.judge.originals import HEART, VOICES
from training.judge.sets import ROUND_TRIP
from training.judge.speak import CLONES, CODEC, DEFAULT_VOICE, STORY
from training.judge.wer import BASE, TINY

SETS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("wer", "--size", BASE): (DEFAULT_VOICE, STORY),
    ("wer", "--size", BASE, "--take", ROUND_TRIP): (CODEC,),
    ("wer", "--size", TINY): (DEFAULT_VOICE,),
    ("similarity",): (CLONES, CODEC),
    ("quality",): (DEFAULT_VOICE,),
}
TEACHERS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("wer", "--size", BASE): (HEART,),
    ("wer", "--size", TINY): (HEART,),
    ("similarity",): (VOICES,),
    ("quality",): (HEART,),
}


def run(python: str, module: str, *arguments: str | Path) -> int:
    return subprocess.run([python, "-m", f"training.judge.{module}", *map(str, arguments)], check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("judged"))
    parser.add_argument("--judges", default=sys.executable, help="Python with the judges' packages")
    parser.add_argument("--model", type=Path, help="model folder; without it duetts-mini")
    parser.add_argument("--url", help="a server that runs, in the place of one that is started")
    parser.add_argument("--originals", type=Path, help="folder of training.judge.originals")
    parser.add_argument("--voice", help="who speaks for the default voice; none is the bare model")
    options = parser.parse_args()
    given = {"--model": options.model, "--url": options.url, "--voice": options.voice, "--originals": options.originals}
    asked = [word for flag, value in given.items() if value for word in (flag, value)]
    if run(sys.executable, "speak", "--out", options.out, *asked):
        raise SystemExit("the server could not be asked for everything")
    for judge, names in SETS.items():
        sets = [options.out / name for name in names]
        sets += [options.originals / name for name in TEACHERS.get(judge, ())] if options.originals else []
        there = [folder for folder in sets if folder.is_dir()]
        if there and run(options.judges, judge[0], *there, *judge[1:]):
            raise SystemExit(f"the judge {judge[0]} failed")
    raise SystemExit(run(sys.executable, "gates", "--out", options.out, *(asked[-2:] if options.originals else [])))


if __name__ == "__main__":
    main()
