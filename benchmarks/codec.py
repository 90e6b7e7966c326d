"""Times the codec's stream decoder on a GPU: whole calls, each kernel of a call beside torch, and block sizes. Writes JSON.

    python -m benchmarks.codec [--streams 1 8 64] [--frames 1 2 4 16] [--stages STREAMSxFRAMES ...] [--output FILE]
    python -m benchmarks.codec --sweep [--stages 1x1 64x4] [--limit-s 300]   other block sizes for the kernels that take longest
    python -m benchmarks.codec --compile   compiles the kernels of all calls for an H200, with or without a GPU, on all
                                           processors: say it first on a new machine
    python -m benchmarks.codec --dry-run [--sweep]   a tiny codec on a CPU: the program's numbers mean nothing, its path does

S2 Pro's dimensions, random weights, float16. A call is one replay of a recording: microseconds, microseconds for a second of
audio, TFLOP/s of its convolutions' products. Of each kind of kernel in a call: products, bytes that must move,
time of one alone (many in one recording, so small signals come from the L2), and for convolutions torch's conv1d in its
own layout, without the activation, the bias and the residual that ours holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "codec.json"
STAGES = ["1x1", "8x2", "64x4"]
SWEPT = 8  # kinds of kernels, those that take longest
TINY = {
    "encoder_dim": 8, "encoder_rates": [2, 2], "encoder_transformer_layers": [0, 0], "latent_dim": 32, "decoder_dim": 96,
    "decoder_rates": [2, 2], "downsample_factor": [2, 2], "codebook_dim": 8, "semantic_codebook_size": 16,
    "residual_codebook_size": 8, "n_residual_codebooks": 2, "pre_module_layers": 1, "post_module_layers": 1,
    "quantizer_transformer": {"n_layer": 1, "n_head": 2, "head_dim": 16, "intermediate_size": 48, "window": 4},
}  # fmt: skip


@dataclass
class Kind:
    """Calls of one kernel with the same shapes, of which there are `count` in a decoder's call."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    count: int = 1
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Steps of all streams."""
        x, taps = self.arguments[0], self.taps
        return int(len(x) * (x.shape[1] - (taps - 1) * int(self.options.get("dilation", 1))))

    @property
    def taps(self) -> int:
        inputs = self.arguments[0].shape[-1]
        return int(self.options.get("taps", 1) if self.name == "conv" else self.arguments[1].shape[0] // inputs)

    @property
    def key(self) -> str:
        shapes = [tuple(each.shape) for each in self.arguments if hasattr(each, "shape")]
        plain = {name: value if isinstance(value, int | bool) else value is not None for name, value in self.options.items()}
        return f"{self.name} {shapes} {plain}"

    @property
    def flops(self) -> int:
        if self.name not in ("conv", "residual_unit"):
            return 0
        inputs, outputs = self.arguments[0].shape[-1], self.arguments[1].shape[1]
        inner = outputs * outputs if self.name == "residual_unit" else 0
        return 2 * self.rows * (self.taps * inputs * outputs + inner)

    @property
    def num_bytes(self) -> int:
        """Every tensor once, but tables, states and pasts by what a call takes of them: those are small."""
        if self.name not in ("conv", "residual_unit"):
            return 0
        tensors = [*self.arguments, *(self.options.get(name) for name in ("residual", "raw", "ahead"))]
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    def parts(self) -> list[Kind]:
        """A residual unit of a wide stage is two convolutions."""
        from duetts.kernels.codec import NARROW

        x = self.arguments[0]
        if self.name != "residual_unit" or x.shape[2] <= NARROW:
            return [self]
        weight, bias, alpha, weight_out, bias_out = self.arguments[1:]
        inner = x.new_empty(self.options["residual"].shape)
        first = {"taps": self.taps, "dilation": self.options["dilation"], "alpha": alpha, "ahead": inner}
        second = {"alpha": self.options["next_alpha"]} | {name: self.options[name] for name in ("residual", "raw", "ahead")}
        counts = {"counts": self.options["counts"]}
        return [
            Kind("conv", (x, weight, bias), first | counts, self.count),
            Kind("conv", (inner, weight_out, bias_out), second | counts, self.count),
        ]

    def label(self) -> str:
        shape = self.arguments[0].shape
        if self.name not in ("conv", "residual_unit"):
            return self.name
        parts = "".join(f" {name}" for name in ("residual", "raw") if self.options.get(name) is not None)
        dilation = self.options.get("dilation", 1)
        return f"{self.name} {shape[-1]}->{self.arguments[1].shape[1]} taps {self.taps}/{dilation} rows {self.rows}{parts}"


class Recorder:
    """Stands in for `duetts.kernels` in the decoder and notes what is called."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.kinds: dict[str, Kind] = {}

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(self._kernels, name)):
            return getattr(self._kernels, name)

        def call(*arguments: Any, **options: Any) -> Any:
            kind = Kind(name, arguments, options)
            known = self.kinds.setdefault(kind.key, kind)
            known.count += known is not kind
            return getattr(self._kernels, name)(*arguments, **options)

        return call


@dataclass
class Bench:
    """A decoder and where it runs."""

    decoder: Any
    config: Any
    device: Any

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    @property
    def frame_s(self) -> float:
        return float(self.config.frame_length / self.config.sample_rate)

    def inputs(self, streams: int, frames: int) -> tuple[Any, Any, Any]:
        import torch

        codes = torch.randint(0, self.config.residual_size, (streams, self.config.num_codebooks, frames), device=self.device)
        return codes, torch.arange(streams, device=self.device), self.decoder.new_state(streams)

    def time_us(self, run: Callable[[], Any]) -> float:
        """Of one call, by the median of replays; on a CPU of the first call, for want of better."""
        if self.on_gpu:
            from benchmarks.kernel_case import time_us

            return time_us(lambda index: run(), 1)
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e6

    def kinds(self, streams: int, frames: int) -> list[Kind]:
        """The kernels of a call."""
        from duetts.models import stream_decoder

        own = stream_decoder.kernels
        recorder = stream_decoder.kernels = Recorder(own)  # type: ignore[assignment]
        try:
            self.decoder.decode(*self.inputs(streams, frames))
        finally:
            stream_decoder.kernels = own
        return [part for kind in recorder.kinds.values() for part in kind.parts()]


def open_bench(device_name: str, tiny: bool) -> Bench:
    import torch

    from duetts.checkpoint import randomise_codec
    from duetts.model_config import CodecConfig
    from duetts.models.codec import Codec
    from duetts.models.stream_decoder import StreamDecoder

    device = torch.device(device_name)
    config = CodecConfig.from_dict(TINY) if tiny else CodecConfig()
    with device:
        codec = Codec(config).eval().requires_grad_(False)
    if device.type != "meta":
        randomise_codec(codec, torch.Generator(device).manual_seed(0))
    return Bench(StreamDecoder(codec, torch.float32 if tiny else torch.float16), config, device)


def time_calls(bench: Bench, streams: list[int], frames: list[int]) -> Iterator[dict[str, Any]]:
    """Whole calls, to samples in device memory, as many frames as a recording may have."""
    from duetts import kernels
    from duetts.engine.vocoder import MOST

    per_frame = sum(kind.flops * kind.count for kind in bench.kinds(1, 1))
    for count, length in itertools.product(streams, frames):
        if count * length > MOST:
            continue
        codes, slots, state = bench.inputs(count, length)

        def run(codes: Any = codes, slots: Any = slots, state: Any = state) -> Any:
            return kernels.pcm16(bench.decoder.decode(codes, slots, state))

        us = bench.time_us(run)
        row = {"streams": count, "frames": length, "us": us, "us_per_audio_s": us / (count * length * bench.frame_s)}
        row["tflops"] = per_frame * count * length / us / 1e6
        row["audio_s_per_s"] = 1e6 / row["us_per_audio_s"]
        print("{streams:3d} x {frames:2d}: {us:9.1f} us, {us_per_audio_s:8.1f} us/audio-s, {tflops:6.1f} TFLOP/s".format(**row))
        yield row


def in_torchs_layout(kind: Kind) -> Callable[[], Any]:
    """The same products as conv1d [streams, channels, steps]; the 1x1 convolution of a unit too."""
    import torch
    import torch.nn.functional as F

    x, weight = kind.arguments[0], kind.arguments[1]
    dilation, inputs, outputs = int(kind.options.get("dilation", 1)), x.shape[2], weight.shape[1]
    signal = x.transpose(1, 2).contiguous()
    kernel = weight.view(kind.taps, inputs, outputs).permute(2, 1, 0).contiguous()
    point = torch.zeros(outputs, outputs, 1, device=x.device, dtype=x.dtype) if kind.name == "residual_unit" else None

    def run() -> Any:
        y = F.conv1d(signal, kernel, dilation=dilation)
        return y if point is None else F.conv1d(y, point)

    return run


def time_stages(bench: Bench, streams: int, frames: int) -> Iterator[dict[str, Any]]:
    """Each kind of kernel in a call, the one that takes longest first."""
    from duetts import kernels

    rows = []
    for kind in bench.kinds(streams, frames):
        own = getattr(kernels, kind.name)
        us = bench.time_us(lambda own=own, kind=kind: own(*kind.arguments, **kind.options))  # type: ignore[misc]
        row = {"streams": streams, "frames": frames, "kernel": kind.label(), "count": kind.count, "us": us}
        if kind.flops:
            row |= {"gflop": kind.flops / 1e9, "mbyte": kind.num_bytes / 1e6, "tflops": kind.flops / us / 1e6}
            row |= {"gbytes_per_s": kind.num_bytes / us / 1e3, "conv1d_us": bench.time_us(in_torchs_layout(kind))}
        rows.append(row)
    for row in sorted(rows, key=lambda row: -row["us"] * row["count"]):
        numbers = "" if "tflops" not in row else (
            "{gflop:8.2f} GFLOP {mbyte:8.2f} MB {tflops:6.1f} TFLOP/s {gbytes_per_s:7.0f} GB/s, conv1d {conv1d_us:8.1f} us"
        ).format(**row)  # fmt: skip
        print(f"{row['count']:2d} x {row['us']:8.1f} us  {row['kernel']:58s} {numbers}")
        yield row


def candidates(kind: Kind) -> list[Any]:
    """Block sizes worth a try, the most promising first: those of few rows for few, splits only where there are few tiles."""
    from duetts.kernels import codec

    x, outputs, card = kind.arguments[0], kind.arguments[1].shape[1], codec.Card(132, 227 * 1024)
    if kind.name == "residual_unit":
        today = codec.choose_unit_tile(kind.rows, outputs, kind.taps, x.element_size(), card)
        sizes = itertools.product((16, 32, 64, 128, 256), (32, 64), (4, 8, 16), (2, 3, 4), (False, True))
        units = [codec.UnitTile(*size) for size in sizes if size[0] <= 16 * size[2] and size[0] * 2 >= size[2] * 8]
        units = [unit for unit in units if codec.multiplies(unit.rows, min(codec._halves(outputs)))]
        return sorted(units, key=lambda tile: abs(math.log2(tile.rows / today.rows)))
    few = kind.rows <= 64
    rows, widths = ((16, 32, 64), (32, 64, 128)) if few else ((64, 128, 256), (64, 128, 256))
    sizes = itertools.product(rows, widths, (64, 128) if few else (32, 64), (1, 2, 3, 4, 8, 16), (4, 8), (3, 4), (False, True))
    tiles = [codec.Tile(*size) for size in sizes if size[0] * size[1] <= 4096 * size[4] and codec.multiplies(*size[:2])]
    tiles = [tile for tile in tiles if tile.splits == 1 or codec._tiles(kind.rows, outputs, *tile[:2]) * tile.splits <= 264]
    return sorted(tiles, key=lambda tile: codec._tile_seconds(tile, kind.rows, x.shape[2], outputs, kind.taps, 132))


def sweep(bench: Bench, streams: int, frames: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Candidates of the kernels that take longest, as many as the time allows, beside what is chosen today."""
    import torch

    timed = [(time_kind(bench, kind, None), kind) for kind in bench.kinds(streams, frames) if kind.flops]
    timed.sort(key=lambda pair: -pair[0] * pair[1].count)
    deadline = time.monotonic() + limit_s
    for place, (today_us, kind) in enumerate(timed[:SWEPT]):
        until = time.monotonic() + (deadline - time.monotonic()) / (min(SWEPT, len(timed)) - place)
        tries = candidates(kind) if bench.on_gpu else candidates(kind)[:1]

        def compile_one(tile: Any, kind: Kind = kind, until: float = until) -> bool:
            if time.monotonic() > until:
                return False
            with torch.inference_mode():
                return time_kind(bench, kind, tile, once=True) < math.inf

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # most of a compiler's time is outside the interpreter
            fine = [tile for tile, ok in zip(tries, pool.map(compile_one, tries), strict=True) if ok]
        found = sorted((time_kind(bench, kind, tile), tuple(tile)) for tile in fine)
        best = found[0] if found else (math.inf, ())
        print(f"{kind.label():58s} today {today_us:8.1f} us, best {best[0]:8.1f} us {best[1]}, {len(found)} of {len(tries)}")
        yield {"streams": streams, "frames": frames, "kernel": kind.label(), "count": kind.count, "today_us": today_us,
               "tried": [{"us": us, "tile": tile} for us, tile in found[:12]]}  # fmt: skip


def time_kind(bench: Bench, kind: Kind, tile: Any, *, once: bool = False) -> float:
    """Microseconds with a tile (None: today's); infinite if it does not fit the card."""
    from duetts.kernels import codec

    def run() -> None:
        getattr(codec, kind.name)(*kind.arguments, **kind.options, tile=tile)

    try:
        if once:
            run()
            return 0.0
        return bench.time_us(run)
    except Exception as failure:  # a tile may need more of a processor than there is
        print(f"  {tile}: {type(failure).__name__} {str(failure)[:80]}", file=sys.stderr)
        return math.inf


def compile_share(calls: list[tuple[int, int]], worker: int, workers: int) -> list[dict[str, Any]]:
    """Every `workers`-th program that these calls launch, for an H200: registers, bytes of stack and of shared memory."""
    import torch
    import triton
    from benchmarks.kernel_compile import CAPABILITY, MULTIPROCESSORS, Card, resources
    from triton.runtime.jit import JITFunction

    from duetts import kernels
    from duetts.kernels import codec, projection

    triton.runtime.driver.set_active(Card())
    projection.device_of = lambda x: projection.Device(CAPABILITY, MULTIPROCESSORS, 228 * 1024)
    launch, rows, seen = JITFunction.run, [], dict[tuple[Any, ...], int]()

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        fixed = [value for name, value in zip(self.arg_names, arguments, strict=False) if name in names_of_constants(self)]
        key = (self.__name__, *fixed, *sorted(options.items()))
        if key in seen or seen.setdefault(key, len(seen)) % workers != worker:
            return
        made = launch(self, *arguments, grid=grid, warmup=True, **options)
        registers, stack = resources(made.asm["cubin"])
        rows.append({"kernel": self.__name__, "registers": registers, "stack": stack, "shared": made.metadata.shared})

    JITFunction.run, kernels._codec = compile_only, lambda x: codec  # type: ignore[method-assign, assignment]
    bench = open_bench("meta", tiny=False)
    with torch.inference_mode():
        for count, length in calls:
            kernels.pcm16(bench.decoder.decode(*bench.inputs(count, length)))
    return rows


def names_of_constants(kernel: Any) -> set[str]:
    return {parameter.name for parameter in kernel.params if parameter.is_constexpr}


def compile_all(streams: list[int], frames: list[int]) -> list[dict[str, Any]]:
    """Fills Triton's cache with the codec's programs of these calls, on all processors, and says what is unusual."""
    from benchmarks.kernel_compile import SHARED_BYTES

    from duetts.engine.vocoder import MOST

    calls = [(count, length) for count, length in itertools.product(streams, frames) if count * length <= MOST]
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        shares = pool.map(compile_share, [calls] * workers, range(workers), [workers] * workers)
        rows = [row for share in shares for row in share]
    for row in rows:
        if row["stack"] or row["shared"] > SHARED_BYTES:
            print(row)
    print(f"{len(rows)} programs, {sum(bool(row['stack']) for row in rows)} spill")
    return rows


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--stages", nargs="*", default=STAGES, metavar="STREAMSxFRAMES")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(words)
    if chosen.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"
        chosen.streams, chosen.frames, chosen.stages = [2], [1], ["2x1"]
    import torch

    if chosen.compile:
        results: dict[str, Any] = {"programs": compile_all(chosen.streams, chosen.frames)}
    else:
        bench = open_bench("cpu" if chosen.dry_run else "cuda", tiny=chosen.dry_run)
        places = [tuple(int(each) for each in stage.split("x")) for stage in chosen.stages]
        with torch.inference_mode():
            if chosen.sweep:
                share_s = chosen.limit_s / max(1, len(places))
                results = {"sweep": [row for s, f in places for row in sweep(bench, s, f, share_s)]}
            else:
                results = {"calls": list(time_calls(bench, chosen.streams, chosen.frames))}
                results["stages"] = [row for s, f in places for row in time_stages(bench, s, f)]
        name = torch.cuda.get_device_name() if bench.on_gpu else "cpu, dry run"
        results |= {"device": name, "torch": torch.__version__, "decoder_bytes": bench.decoder.nbytes}
    output = chosen.output or (None if chosen.dry_run or chosen.compile else RESULTS)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
