"""Codec, phase A: `python -m training.codec.train --audio DIR --held-out DIR --run DIR --minutes 20`.

The schedule follows the clock: `--minutes` is the length of the whole run, over all its resumed parts, compilation left out.
A run that finds `state.pt` in its folder goes on from there; else `--weights` may name exported weights to start from. Audio
that appears while it trains is taken in.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from training.codec.evaluate import evaluate
from training.codec.model import CodecTrainee, Step, kept_books, weight_groups
from training.codec.pool import Pool
from training.codec.quantising import DEAD, Usage
from training.codec.state import export_codec, export_weights, read_weights, save_state
from training.recipe import CROP_FRAMES
from training.report import say

EMA = 0.999
NORM_ROOM = 3.0  # gradients longer than this many times the usual length are shortened
REVIVE_EVERY, REVIVE_UNTIL = 20, 0.8  # steps; share of the run
LOAD_EVERY, LOAD_MOST = 100, 24  # steps; shards at a time
COMPILE_ERRORS = (RuntimeError, OSError, ValueError, TypeError, AssertionError, KeyError, AttributeError, ImportError)


class CodecRun:
    """Model, optimiser, averages and clock of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.amp = self.device.type == "cuda"
        torch.manual_seed(options.seed)
        self.trainee = CodecTrainee().to(self.device)
        self.average = deepcopy(self.trainee)
        self.optimizer = torch.optim.AdamW(
            weight_groups(self.trainee, 0.01), lr=options.lr, betas=(0.8, 0.99), fused=self.device.type == "cuda"
        )
        self.usage = Usage(self.trainee.codec.quantizer)
        self.usual_norm = torch.zeros((), device=self.device)
        self.step = 0
        self.spent_s = 0.0
        self.folder = Path(options.run)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.sums: dict[str, torch.Tensor] = {}

    # -- disk ----------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        if not all(bool(value.isfinite().all()) for value in self.trainee.parameters()):
            raise FloatingPointError(f"step {self.step}: weights are not finite; the last good state is kept")
        export_codec(self.average.codec, self.folder / "export")
        export_weights(self.readers(), self.folder / "export", "readers")
        values = {
            "trainee": self.trainee.state_dict(), "average": self.average.state_dict(), "step": self.step,
            "optimizer": self.optimizer.state_dict(), "usage": self.usage.shares, "spent_s": self.spent_s,
            "usual_norm": self.usual_norm,
        }  # fmt: skip
        save_state(self.folder / "state.pt", values)

    def readers(self) -> nn.ModuleList:
        return nn.ModuleList([self.average.semantic_head, self.average.recogniser])

    def resume(self) -> str:
        """From this folder's state, else from exported weights, else from nothing."""
        path = self.folder / "state.pt"
        if not path.exists():
            return "starting" if self.options.weights is None else self.start_from(Path(self.options.weights))
        values = torch.load(path, map_location=self.device, weights_only=True)
        self.trainee.load_state_dict(values["trainee"])
        self.average.load_state_dict(values["average"])
        self.optimizer.load_state_dict(values["optimizer"])
        self.usage.shares = values["usage"]
        self.step, self.spent_s, self.usual_norm = values["step"], values["spent_s"], values["usual_norm"]
        return "resumed"

    def start_from(self, folder: Path) -> str:
        """Weights without moments: the codec, and the readers where they are there too. No code counts as dead yet."""
        self.average.codec.load_state_dict(read_weights(folder, "codec"))
        readers = read_weights(folder, "readers")
        if readers:
            self.readers().load_state_dict(readers)
        self.trainee.load_state_dict(self.average.state_dict())
        for share in self.usage.shares:
            share.fill_(1.0)
        return f"starting from weights {'and readers ' if readers else ''}in {folder}"

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        return min(1.0, self.spent_s / (60 * self.options.minutes))

    def rate(self) -> float:
        """Linear warm-up, then a cosine over the run's time, down to 2 %."""
        warm = min(1.0, (self.step + 1) / self.options.warmup)
        return self.options.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.progress)))

    def train_step(self, pool: Pool) -> Step:
        wave, labels = pool.crops(self.options.batch, self.options.frames)
        kept = kept_books(len(wave), self.trainee.codec.config.num_residual, self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        step: Step = self.trainee(wave, labels, kept, self.amp)
        self.optimizer.zero_grad(set_to_none=True)
        step.loss.backward()
        norm = self.clip()
        self.optimizer.step()
        self.usage.count(step.found)
        if self.step % REVIVE_EVERY == 0 and self.progress < REVIVE_UNTIL:
            self.usage.revive(self.trainee.codec.quantizer, step.found)
        decay = min(EMA, (self.step + 1) / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.trainee.parameters()), 1 - decay)
        for name, value in {**step.parts, "norm": norm.detach()}.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), device=self.device)) + value
        self.step += 1
        return step

    @torch.no_grad()
    def clip(self) -> torch.Tensor:
        """Shortens an unusually long gradient, without asking the device for its length; returns that length."""
        grads = [value.grad for value in self.trainee.parameters() if value.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        usual = norm if self.step == 0 else self.usual_norm
        limit = NORM_ROOM * usual
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
        self.usual_norm = torch.lerp(usual, torch.minimum(norm, limit), 0.02)
        return norm

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def compile(self, pool: Pool) -> None:
        """Compiles both halves if that works here, and says how long it took."""
        trainee, started = self.trainee, time.monotonic()
        try:
            trainee.front = torch.compile(trainee.analyse)
            trainee.back = torch.compile(trainee.synthesise)
            self.train_step(pool)
            self.wait()
        except COMPILE_ERRORS as error:
            trainee.front, trainee.back = trainee.analyse, trainee.synthesise
            say(f"compiling failed, going on without: {type(error).__name__}: {str(error)[:300]}")
            return
        say(f"compiled in {time.monotonic() - started:.0f} s")

    def profile(self, pool: Pool, steps: int = 3) -> None:
        """Says which kernels take the device's time."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as found:
            for _ in range(steps):
                self.train_step(pool)
            self.wait()
        say(found.key_averages().table(sort_by="self_device_time_total", row_limit=25, max_name_column_width=90))

    def report(self, steps: int, seconds: float, pool: Pool) -> None:
        names = ("mel", "magnitude", "loudness", "commitment", "semantic", "heard", "reader", "norm")
        parts = "  ".join(f"{name} {float(self.sums[name]) / steps:.3f}" for name in names)
        alive = [int((share > DEAD).sum()) for share in self.usage.shares]
        say(f"step {self.step:6d}  {self.spent_s / 60:5.2f} min  {steps / seconds:5.1f} steps/s  "
            f"lr {self.rate():.1e}  {pool.hours:.1f} h, blends {pool.hours_of('blend'):.1f} h  {parts}  "
            f"codes alive {alive[0]} {min(alive[1:])}..{max(alive[1:])}")  # fmt: skip
        if not math.isfinite(float(self.sums["mel"])):
            raise FloatingPointError(f"step {self.step}: the loss is not finite")
        self.sums = {}


class Every:
    """True once per so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.last = time.monotonic()

    def due(self) -> bool:
        if time.monotonic() - self.last < self.seconds:
            return False
        self.last = time.monotonic()
        return True


def wait_for(pool: Pool, folder: Path, hours: float, kind: str | None = None, patience_s: float = 240) -> None:
    """Takes in audio until there is enough to begin with, of one kind if that is wanted."""
    started = time.monotonic()
    while (pool.hours if kind is None else pool.hours_of(kind)) < hours:
        if not pool.load(folder):
            time.sleep(0.5)
        if time.monotonic() - started > patience_s:
            wanted = f"{hours} h of {kind or 'anything'}"
            raise SystemExit(f"{folder}: {pool.hours:.2f} h after {patience_s:.0f} s, but {wanted} are needed")


def read_held_out(device: torch.device, folder: Path) -> dict[str, Pool]:
    """Clips of each teacher apart, as far as there are any."""
    found = {}
    for kind in ("held-heart", "held-blend"):
        pool = Pool(device, 0.5, only=kind)
        if pool.load(folder):
            found[kind] = pool
            say(f"{pool.hours * 60:.0f} min of {kind}")
    return found


def judge(run: CodecRun, held_out: dict[str, Pool]) -> None:
    for kind, pool in held_out.items():
        say(f"{kind}: {evaluate(run.average, pool).line()}")


def loop(run: CodecRun, pool: Pool, held_out: dict[str, Pool], audio: Path, done: Callable[[], bool]) -> None:
    """Steps until the time is up, with reports, evaluations and saves on the way."""
    options = run.options
    log, look, save = Every(options.log_s), Every(options.evaluate_s), Every(options.save_s)
    marked, marked_step = time.monotonic(), run.step
    before = marked
    while not done():
        run.train_step(pool)
        if run.step % LOAD_EVERY == 0:
            pool.load(audio, LOAD_MOST)
        if run.step % 10 == 0:
            run.wait()  # keeps the clock honest: the host may not run far ahead of the device
        now = time.monotonic()
        run.spent_s, before = run.spent_s + now - before, now
        if log.due() and run.step > marked_step:
            run.report(run.step - marked_step, now - marked, pool)
            marked, marked_step = time.monotonic(), run.step
        if look.due():
            judge(run, held_out)
        if save.due():
            run.save()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audio", required=True, help="folder of training shards")
    parser.add_argument("--held-out", required=True, help="folder of held-out shards")
    parser.add_argument("--run", required=True, help="folder of this run; its state.pt is resumed")
    parser.add_argument("--minutes", type=float, required=True, help="length of the whole schedule")
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes after which this part saves and ends")
    parser.add_argument("--steps", type=int, default=1 << 60, help="stop at this step")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--frames", type=int, default=CROP_FRAMES, help="length of a crop")
    parser.add_argument("--warmup", type=int, default=300, help="steps until the full learning rate")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room-hours", type=float, default=90.0)
    parser.add_argument("--weights", help="folder of exported weights to start from, where there is no state.pt")
    parser.add_argument("--first-hours", type=float, default=1.0, help="audio to wait for before compiling")
    parser.add_argument("--blend-hours", type=float, default=0.0, help="audio of blends to wait for after compiling")
    parser.add_argument("--blend-share", type=float, default=0.4, help="of the crops, as soon as there are blends")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true", help="show what takes the device's time before the schedule begins")
    parser.add_argument("--log-s", type=float, default=30)
    parser.add_argument("--evaluate-s", type=float, default=90)
    parser.add_argument("--save-s", type=float, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    run = CodecRun(options)
    how = run.resume()
    torch.manual_seed(options.seed + run.step)
    audio = Path(options.audio)
    pool = Pool(run.device, options.room_hours, {"blend": options.blend_share})
    wait_for(pool, audio, options.first_hours)
    millions = sum(value.numel() for value in run.trainee.codec.parameters()) / 1e6
    say(f"{how} at step {run.step} on {options.device}: codec of {millions:.2f} M weights, {pool.hours:.2f} h of audio")
    started = time.monotonic()
    if options.compile:
        run.compile(pool)
    wait_for(pool, audio, options.blend_hours, "blend")
    held_out = read_held_out(run.device, Path(options.held_out))
    if options.profile:
        run.profile(pool)
    if run.spent_s == 0:
        judge(run, held_out)
    run.sums = {}

    def done() -> bool:
        late = time.monotonic() - started > 60 * options.stop_after
        return late or run.progress >= 1 or run.step >= options.steps

    loop(run, pool, held_out, audio, done)
    judge(run, held_out)
    run.save()
    say(f"saved step {run.step} after {run.spent_s / 60:.1f} min of training" + (": done" if run.progress >= 1 else ""))


if __name__ == "__main__":
    main()
