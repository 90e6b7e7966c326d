"""The codec in the engine's process against a codec process: first audio, real-time factor and processor time. Writes JSON.

    python benchmarks/codec_process.py [MODEL] [--device cpu] [--codec-device next] [--streams 1 4] [--repeats 10] --output FILE

Both arrangements are started, one engine each, and take turns in every repeat with the same seeds, so that on a CPU both make
the same bytes, which is checked. All of a repeat's listeners begin at once. First audio is until the first chunk, RTF the time
until the last listener's end over the sum of durations; `cpu` is the processor time of all their processes over that sum.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from duetts.conditions import program, write_json
from duetts.config import EngineConfig, ProcessConfig
from duetts.embedded import mini_folder
from duetts.engine.remote import RemoteSpeaker
from duetts.model_config import read_model_config
from duetts.text.prompt import build_prompt
from duetts.text.tokenizer import Tokenizer
from duetts.types import Outcome, Sampling, Utterance

SENTENCE = "The quick brown fox jumps over the lazy dog, and then it takes a rest."
TICKS = os.sysconf("SC_CLK_TCK")


def used_s(speaker: RemoteSpeaker) -> float:
    """Processor seconds of the engine's process and its codec's so far."""
    (engine,) = speaker.stats()["engines"]
    pids = [engine["pid"], *([engine["codec"]["pid"]] if "codec" in engine else [])]
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS


async def one(speaker: RemoteSpeaker, utterance: Utterance) -> tuple[float, bytes]:
    """Seconds until the first chunk, and the whole of the sound."""
    began, first, pcm = time.perf_counter(), 0.0, b""
    async for item in speaker.speak(utterance):
        if isinstance(item, Outcome):
            if item.error is not None:
                raise item.error
            break
        first = first or time.perf_counter() - began
        pcm += item.pcm
    return first, pcm


async def turn(speaker: RemoteSpeaker, work: list[Utterance]) -> tuple[dict[str, Any], list[bytes]]:
    """One turn of one arrangement, and what was heard."""
    used, began = used_s(speaker), time.perf_counter()
    heard = await asyncio.gather(*(one(speaker, utterance) for utterance in work))
    lasted = time.perf_counter() - began
    audio_s = sum(len(pcm) for _, pcm in heard) / 2 / speaker.info.sample_rate
    found = {"first_s": [first for first, _ in heard], "rtf": lasted / audio_s, "cpu": (used_s(speaker) - used) / audio_s}
    return found, [pcm for _, pcm in heard]


def summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    firsts = [1000 * first for each in turns for first in each["first_s"]]
    rtf, cpu = ([each[name] for each in turns] for name in ("rtf", "cpu"))
    return {
        "first_audio_ms_median": statistics.median(firsts),
        "first_audio_ms_least": min(firsts),
        "rtf_median": statistics.median(rtf),
        "rtf_least": min(rtf),
        "rtf_worst": max(rtf),
        "cpu_median": statistics.median(cpu),
    }


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    folder = Path(options.model) if options.model else mini_folder()
    prompt = build_prompt(Tokenizer.load(folder, read_model_config(folder)), [], [], SENTENCE)
    engine = EngineConfig(device=options.device, load_format=options.load_format, max_num_seqs=max(8, *options.streams))
    devices = ("same", options.codec_device)
    speakers = [await RemoteSpeaker.start(folder, engine, ProcessConfig(codec_device=device)) for device in devices]
    rows = []
    try:
        for streams in options.streams:
            turns: list[list[dict[str, Any]]] = [[], []]
            for repeat in range(-1, options.repeats):  # the first is not counted
                work = [
                    Utterance(f"r{seed}", prompt, Sampling(), 1000 * repeat + seed, options.frames, streaming=True)
                    for seed in range(streams)
                ]
                load = os.getloadavg()[0]
                found = [await turn(speaker, work) for speaker in (speakers if repeat % 2 else reversed(speakers))]
                if not repeat % 2:
                    found.reverse()
                if options.device == "cpu" and found[0][1] != found[1][1]:
                    raise RuntimeError("the arrangements have made different bytes")
                for which, (each, _) in enumerate(found):
                    turns[which] += [each | {"load": load}] if repeat >= 0 else []
            for device, each in zip(devices, turns, strict=True):
                loads = [one["load"] for one in each]
                row = {"codec_device": device, "streams": streams, "load": [min(loads), max(loads)], **summary(each)}
                rows.append(row)
                print(row, file=sys.stderr)
    finally:
        await asyncio.gather(*(speaker.close() for speaker in speakers))
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", nargs="?", help="folder; duetts-mini if absent")
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--codec-device", default="next")
    arguments.add_argument("--load-format", default="auto")
    arguments.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    arguments.add_argument("--repeats", type=int, default=10)
    arguments.add_argument("--frames", type=int, default=108, help="frames of each sentence at most, 21.5 a second")
    arguments.add_argument("--output", type=Path, required=True)
    options = arguments.parse_args()
    rows = asyncio.run(measure(options))
    write_json(
        options.output, {"conditions": program(), "options": {k: str(v) for k, v in vars(options).items()}, "rows": rows}
    )


if __name__ == "__main__":
    main()
