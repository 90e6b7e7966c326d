"""The language model: `python -m training.lm.train --lines F --codes DIR... --codec DIR --run DIR --minutes 22`.

The schedule follows the clock: `--minutes` is the length of the whole run, over all its resumed parts. A run that finds
`state.pt` in its folder goes on from there; `--resume FOLDER` goes on from weights that travelled. Code files that appear
while it trains are taken in.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from training.codec.state import save_state
from training.codec.train import COMPILE_ERRORS, Every
from training.data.texts import read_lines
from training.lm.attention import TensorBatch, choose, masked
from training.lm.clips import Gauge, Store
from training.lm.encode import load_encoder
from training.lm.evaluate import evaluate
from training.lm.loader import HELD_KINDS, TRAINING_KINDS, held_batches, temporary_tokenizer, training_batches
from training.lm.model import SMOOTHING, Losses, Trainee, to_device
from training.lm.noise import disturb, neighbour_table
from training.lm.packing import Writer
from training.lm.state import export_model, load_weights
from training.recipe import ROW
from training.report import say

EMA = 0.999
LONGEST_GRADIENT = 1.0
LED_WEIGHT, LED_LAST = 0.2, 0.05
LAST_RATE = 0.02  # of the full learning rate
WARM_AGAIN = 200  # steps of warm-up after weights that travelled without moments


def parameter_groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Matrices decay; embeddings, gains and biases do not."""
    named = list(model.named_parameters())
    matrices = [value for name, value in named if value.ndim > 1 and "embeddings" not in name]
    others = [value for name, value in named if value.ndim == 1 or "embeddings" in name]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


class Run:
    """Model, optimiser, average and clock of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.amp = self.device.type == "cuda"
        torch.manual_seed(options.seed)
        self.tokenizer, config = temporary_tokenizer()
        self.trainee = Trainee(config, options.fast_scale, dropout=options.dropout).to(self.device)
        self.trainee.prepare()
        self.average = deepcopy(self.trainee).eval()
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.trainee.model, 0.05), lr=options.lr, betas=(0.9, 0.95), fused=self.amp
        )
        self.table = neighbour_table(load_encoder(Path(options.codec), torch.device("cpu"))).to(self.device)
        self.compute: Callable[..., Losses] = self.trainee
        self.step, self.warm_from, self.spent_s = 0, 0, 0.0
        self.warmup = options.warmup
        self.folder = Path(options.run)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.led = torch.zeros((), device=self.device)
        self.sums: dict[str, Tensor] = {}
        self.pairs = 0

    # -- disk ----------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        if not all(bool(value.isfinite().all()) for value in self.trainee.parameters()):
            raise FloatingPointError(f"step {self.step}: weights are not finite; the last good state is kept")
        export_model(self.average.model, self.folder / "export", {"step": self.step, "spent_s": round(self.spent_s, 1)})
        values = {
            "trainee": self.trainee.state_dict(), "average": self.average.state_dict(), "step": self.step,
            "optimizer": self.optimizer.state_dict(), "spent_s": self.spent_s,
        }  # fmt: skip
        save_state(self.folder / "state.pt", values)

    def resume(self) -> str:
        """From this folder's state, else from weights that travelled, else from nothing."""
        path = self.folder / "state.pt"
        if path.exists():
            values = torch.load(path, map_location=self.device, weights_only=True)
            self.trainee.load_state_dict(values["trainee"])
            self.average.load_state_dict(values["average"])
            self.optimizer.load_state_dict(values["optimizer"])
            self.step, self.spent_s = values["step"], values["spent_s"]
            return "resumed"
        if self.options.resume is None:
            return "starting"
        progress = load_weights(self.trainee.model, Path(self.options.resume))
        self.average.load_state_dict(self.trainee.state_dict())
        self.step, self.spent_s = int(progress.get("step", 0)), float(progress.get("spent_s", 0.0))
        self.warm_from, self.warmup = self.step, WARM_AGAIN
        return "resumed from weights alone"

    # -- steps ---------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> float:
        return min(1.0, self.spent_s / (60 * self.options.minutes))

    def rate(self) -> float:
        """Linear warm-up, then a cosine over the run's time."""
        warm = min(1.0, (self.step - self.warm_from + 1) / self.warmup)
        return self.options.lr * warm * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * self.progress)))

    def train_step(self, batch: dict[str, Tensor]) -> None:
        self.pairs += int(batch["pairs"])
        inputs = disturb(to_device(batch, self.device), self.table, self.trainee.config.semantic_start)
        self.led.fill_(LED_WEIGHT + (LED_LAST - LED_WEIGHT) * self.progress)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        losses = self.compute(inputs, self.led, SMOOTHING, self.amp)
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        norm = nn.utils.clip_grad_norm_(self.trainee.parameters(), LONGEST_GRADIENT)
        self.optimizer.step()
        decay = min(EMA, (self.step - self.warm_from + 1) / (self.step - self.warm_from + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.trainee.parameters()), 1 - decay)
        parts = {"slow": losses.slow, "fast": losses.books.mean(), "led": losses.led, "norm": norm.detach()}
        for name, value in parts.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), device=self.device)) + value
        self.step += 1

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, batches: Iterator[dict[str, Tensor]], steps: int) -> float:
        """Seconds a step takes, over a few real steps."""
        ready = [next(batches) for _ in range(steps + 1)]
        self.train_step(ready[0])
        self.wait()
        started = time.monotonic()
        for batch in ready[1:]:
            self.train_step(batch)
        self.wait()
        return (time.monotonic() - started) / steps

    def compile(self, batches: Iterator[dict[str, Tensor]]) -> None:
        """Compiles the losses if that works here and is faster; says what it chose."""
        plain = self.timed(batches, 10)
        for _ in range(2):
            started = time.monotonic()
            try:
                self.compute = torch.compile(self.trainee, dynamic=False)
                self.train_step(next(batches))
                self.wait()
                spent, fast = time.monotonic() - started, self.timed(batches, 10)
            except COMPILE_ERRORS as error:
                self.compute = self.trainee
                say(f"compiling failed: {type(error).__name__}: {str(error)[:300]}")
                if self.trainee.core is masked:
                    return
                say("trying again with the mask")
                self.set_core(masked)
                continue
            if fast > plain:
                self.compute = self.trainee
            say(f"a step takes {plain * 1e3:.1f} ms plain, {fast * 1e3:.1f} ms compiled (in {spent:.0f} s)")
            return

    def set_core(self, core: Callable[..., Tensor]) -> None:
        self.trainee.core = self.average.core = core

    def report(self, steps: int, seconds: float, hours: dict[str, float]) -> None:
        means = {name: float(value) / steps for name, value in self.sums.items()}
        parts = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        data = " + ".join(f"{value:.1f}" for value in hours.values())
        say(f"step {self.step:6d}  {self.spent_s / 60:5.2f} min  {steps / seconds:5.2f} steps/s  "
            f"{self.pairs / seconds:5.0f} pairs/s  lr {self.rate():.1e}  {data} h  {parts}")  # fmt: skip
        if not all(map(math.isfinite, means.values())):
            raise FloatingPointError(f"step {self.step}: the loss is not finite")
        self.sums, self.pairs = {}, 0


def wait_for(gauge: Gauge, hours: float, patience_s: float) -> None:
    """Waits for enough codes to begin with."""
    started = time.monotonic()
    while gauge.read() < hours:
        time.sleep(1)
        if time.monotonic() - started > patience_s:
            raise SystemExit(f"only {gauge.read():.2f} h of codes after {patience_s:.0f} s; {hours} are needed")


def loop(
    run: Run, batches: Iterator[dict[str, Tensor]], held: list[TensorBatch], gauge: Gauge, done: Callable[[], bool]
) -> None:
    """Steps until the time is up, with reports, evaluations and saves on the way."""
    options = run.options
    log, look, save = Every(options.log_s), Every(options.evaluate_s), Every(options.save_s)
    before = marked = time.monotonic()
    marked_step = run.step
    while not done():
        run.train_step(next(batches))
        if run.step % 10 == 0:
            run.wait()  # keeps the clock honest: the host may not run far ahead of the device
        now = time.monotonic()
        run.spent_s, before = run.spent_s + now - before, now
        if log.due():
            gauge.read()
            run.report(run.step - marked_step, now - marked, gauge.hours)
            marked, marked_step = time.monotonic(), run.step
        if look.due() and held:
            say(evaluate(run.average, held, run.amp).line())
        if save.due():
            run.save()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", required=True, type=Path, help="file written by training.data.texts")
    parser.add_argument("--codes", required=True, nargs="+", type=Path, help="folders of code files")
    parser.add_argument("--codec", required=True, help="folder with codec.safetensors")
    parser.add_argument("--run", required=True, help="folder of this run; its state.pt is resumed")
    parser.add_argument("--resume", help="folder of exported weights to go on from, where there is no state.pt")
    parser.add_argument("--minutes", type=float, required=True, help="length of the whole schedule")
    parser.add_argument("--stop-after", type=float, default=1e9, help="minutes after which this part saves and ends")
    parser.add_argument("--steps", type=int, default=1 << 60, help="stop at this step")
    parser.add_argument("--rows", type=int, default=48, help="rows of a batch")
    parser.add_argument("--length", type=int, default=ROW, help="positions of a row")
    parser.add_argument("--workers", type=int, default=4, help="processes that make batches")
    parser.add_argument("--warmup", type=int, default=500, help="steps until the full learning rate")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--fast-scale", type=float, default=0.4, help="weight of the residual books' sum")
    parser.add_argument("--dropout", type=float, default=0.1, help="share of what a slow layer adds that is left out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first-hours", type=float, default=1.0, help="codes to wait for before the first step")
    parser.add_argument("--patience-s", type=float, default=240)
    parser.add_argument("--held-count", type=int, default=4, help="held-out batches")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--log-s", type=float, default=30)
    parser.add_argument("--evaluate-s", type=float, default=120)
    parser.add_argument("--save-s", type=float, default=150)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_float32_matmul_precision("high")
    run = Run(options)
    how = run.resume()
    torch.manual_seed(options.seed + run.step)
    lines = read_lines(options.lines)
    gauge = Gauge(options.codes, TRAINING_KINDS)
    wait_for(gauge, options.first_hours, options.patience_s)
    held_store = Store(lines, options.codes, HELD_KINDS)
    held_store.load()
    fresh = held_batches(held_store, Writer(run.tokenizer), options.rows, options.length, options.held_count)
    held = [to_device({name: torch.from_numpy(value) for name, value in batch.items()}, run.device) for batch in fresh]
    seed = options.seed * 1_000_003 + run.step
    batches = training_batches(options.lines, options.codes, options.rows, options.length, seed, options.workers)
    slow = run.trainee.config.slow
    core, why = choose(to_device(next(batches), run.device), slow.num_heads, slow.num_kv_heads, slow.head_dim)
    run.set_core(core)
    millions = sum(value.numel() for value in run.trainee.model.parameters()) / 1e6
    say(f"{how} at step {run.step} on {options.device}: {millions:.2f} M weights, {gauge.read():.2f} h of codes, "
        f"{sum(held_store.hours.values()) * 60:.0f} min held out; {why}")  # fmt: skip
    started = time.monotonic()
    if options.compile:
        run.compile(batches)
        run.spent_s += time.monotonic() - started
    run.sums, run.pairs = {}, 0

    def done() -> bool:
        late = time.monotonic() - started > 60 * options.stop_after
        return late or run.progress >= 1 or run.step >= options.steps

    loop(run, batches, held, gauge, done)
    if held:
        say(evaluate(run.average, held, run.amp).line())
    run.save()
    say(f"saved step {run.step} after {run.spent_s / 60:.1f} min of training" + (": done" if run.progress >= 1 else ""))


if __name__ == "__main__":
    main()
