"""Whether one new position of every sequence is attended for by duetts' own kernel, under a name that scripts may know already.

    from duetts.attention import fish_kvcache_attn
    fish_kvcache_attn.is_available()      # False without a GPU of compute capability 8.0 or without Triton
    fish_kvcache_attn.load_error()        # why not
    fish_kvcache_attn.self_test("cuda")   # the largest error against plain torch

`DUETTS_FISH_KVCACHE_ATTN` decides: auto (use it where it is available), on, off, or required (a start without it fails, and so
does a step that it cannot serve). The kernel is `duetts.kernels.decode_attention`; it takes heads of 16 to 256 elements,
pages of a power of two, and a bfloat16, float16 or float32 cache of the queries' type, at any length that its page table holds.
Torch is loaded by the first question, not by the import.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from duetts.config import fish_kvcache_attn as mode_of
from duetts.errors import FastPathMissing

if TYPE_CHECKING:
    import torch

TOLERANCE = 0.02  # of bfloat16 outputs of about 1
HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
PAGES = 72  # of a row in the test: more positions than one program takes at a time

log = logging.getLogger(__name__)


def load_error() -> Exception | None:
    """Why the kernel cannot be used here; None if it can."""
    import torch

    from duetts.kernels import guard

    if find_spec("triton") is None:
        return ImportError("triton is not installed")
    if not torch.cuda.is_available():
        return RuntimeError("there is no CUDA device")
    capability = torch.cuda.get_device_capability()
    if capability < guard.LEAST_CAPABILITY:
        return RuntimeError(f"compute capability {capability[0]}.{capability[1]} is below 8.0")
    try:
        from duetts.kernels import attention  # noqa: F401
    except (ImportError, AttributeError, RuntimeError) as error:  # of a Triton that is too old or damaged
        return error
    return None


def is_available() -> bool:
    """Whether this machine can run the kernel."""
    return load_error() is None


def is_enabled() -> bool:
    """Whether the kernel is used where it is available. Raises `ConfigError` for a word that is none."""
    return mode_of() != "off"


def is_required() -> bool:
    """Whether nothing starts without the kernel. Raises `ConfigError` for a word that is none."""
    return mode_of() == "required"


def status() -> dict[str, Any]:
    """Mode, whether it is available and why not, and launches of this process so far (of recorded steps: recordings).

    `hits_short`: one kernel, which has a whole row to itself; `hits_long`: rows in parts, which a second kernel joins;
    `fallbacks`: by reason, what plain torch did instead.
    """
    from duetts.kernels import guard

    error, use = load_error(), guard.DECODE
    return {
        "mode": mode_of(), "available": error is None, "reason": "" if error is None else str(error),
        "hits_short": use.short, "hits_long": use.long, "fallbacks": dict(use.fallbacks),
    }  # fmt: skip


def prepare(device: torch.device | str) -> None:
    """Before the first step on a device: puts the mode into force. Raises `ConfigError` for a word that is none, and
    `FastPathMissing` if the kernel is required and is not there or is wrong."""
    import torch

    from duetts.kernels import guard

    mode = mode_of()
    guard.DECODE.enabled, guard.DECODE.required = mode != "off", False
    on_gpu = torch.device(device).type == "cuda"
    error = load_error() if on_gpu else RuntimeError(f"the model runs on {device}")
    if mode == "on" and error is not None:
        log.warning("fish_kvcache_attn is on but not available (%s): plain torch attends", error)
    if mode != "required":
        return
    if error is not None:
        raise FastPathMissing(f"fish_kvcache_attn is required but not available: {error}")
    found = self_test(device)
    if not found <= TOLERANCE:
        raise FastPathMissing(f"fish_kvcache_attn is required but is off by {found:.3g}, more than {TOLERANCE}")
    guard.DECODE.required = True


def self_test(device: torch.device | str, dtype: torch.dtype | None = None) -> float:
    """The largest error of the kernel against plain torch at S2 Pro's sizes, rows whole and in parts, outputs being about 1.
    `dtype` is bfloat16 unless given. Raises what keeps the kernel from running."""
    import torch

    from duetts.kernels import attention, reference

    dtype = dtype or torch.bfloat16
    lengths = [0, 1, 17, 500, PAGES * PAGE - 1]
    rows = len(lengths)
    dice = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice).to(device, dtype)

    q, k, v = drawn(rows, HEADS, DIM), drawn(rows, KV_HEADS, DIM), drawn(rows, KV_HEADS, DIM)
    keys, values = (drawn(rows * PAGES + 1, KV_HEADS, PAGE, DIM) for _ in range(2))
    tables = torch.randperm(rows * PAGES, generator=dice).view(rows, PAGES).to(device, torch.int32)
    slots, positions = torch.arange(rows, device=device).flip(0), torch.tensor(lengths, device=device)
    wide = (keys.float(), values.float())
    wanted = reference.decode_attention(q.float(), k.float(), v.float(), *wide, tables, slots, positions)
    outputs = [attention.decode_attention(q, k, v, keys, values, tables, slots, positions, programs=each) for each in (1, 7)]
    return max(float((output.float() - wanted).abs().max()) for output in outputs)
