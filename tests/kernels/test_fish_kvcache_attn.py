"""The public face of decode attention: its modes, what it says of itself, and what happens where it is required."""

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from duetts import kernels
from duetts.attention import fish_kvcache_attn
from duetts.cli import fail
from duetts.config import fish_kvcache_attn as mode_of
from duetts.errors import ConfigError, FastPathMissing
from duetts.kernels import guard

NAME, ALIAS = "DUETTS_FISH_KVCACHE_ATTN", "VLLM_OMNI_FISH_KVCACHE_ATTN"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.delenv(ALIAS, raising=False)
    before, guard.DECODE = guard.DECODE, guard.DecodeUse()
    yield
    guard.DECODE = before


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ({}, "auto"), ({NAME: ""}, "auto"), ({NAME: " Auto "}, "auto"), ({NAME: "1"}, "on"), ({NAME: "TRUE"}, "on"),
        ({NAME: "yes"}, "on"), ({NAME: "On"}, "on"), ({NAME: "0"}, "off"), ({NAME: "false"}, "off"), ({NAME: "no"}, "off"),
        ({NAME: "OFF"}, "off"), ({NAME: "disable"}, "off"), ({NAME: "disabled"}, "off"), ({NAME: "Required"}, "required"),
        ({ALIAS: "0"}, "off"), ({ALIAS: "required"}, "required"), ({NAME: "1", ALIAS: "0"}, "on"),
        ({NAME: "", ALIAS: "0"}, "off"),
    ],
)  # fmt: skip
def test_words(values: dict[str, str], mode: str) -> None:
    assert mode_of(values) == mode


@pytest.mark.parametrize("name", [NAME, ALIAS])
def test_any_other_word_is_an_error_that_lists_the_right_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is 'maybe', which is none of auto, 1, .*disabled, required"):
        mode_of({name: "maybe"})


def test_importing_it_loads_neither_torch_nor_triton() -> None:
    program = "import sys; import duetts.attention.fish_kvcache_attn; assert not {'torch', 'triton'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=200, check=False).returncode == 0


@no_gpu
def test_without_a_gpu_it_is_not_available_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fish_kvcache_attn.is_available()
    assert "CUDA" in str(fish_kvcache_attn.load_error())
    assert fish_kvcache_attn.is_enabled()
    assert not fish_kvcache_attn.is_required()
    assert fish_kvcache_attn.status() == {
        "mode": "auto", "available": False, "reason": "there is no CUDA device", "hits_short": 0, "hits_long": 0,
        "fallbacks": {},
    }  # fmt: skip
    monkeypatch.setattr(fish_kvcache_attn, "find_spec", lambda name: None)
    assert isinstance(fish_kvcache_attn.load_error(), ImportError)


@no_gpu
def test_on_warns_and_auto_does_not(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fish_kvcache_attn.prepare("cuda")
    assert not caplog.records
    monkeypatch.setenv(NAME, "on")
    fish_kvcache_attn.prepare("cuda")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_off_keeps_the_kernel_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "off")
    fish_kvcache_attn.prepare("cpu")
    assert not fish_kvcache_attn.is_enabled()
    assert not guard.DECODE.enabled


def test_required_but_missing_ends_a_start_with_code_5(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv(NAME, "required")
    with pytest.raises(FastPathMissing, match="runs on cpu") as caught:
        fish_kvcache_attn.prepare("cpu")
    with pytest.raises(BaseException) as left:  # typer's own exit
        fail(caught.value)
    assert left.value.exit_code == 5  # type: ignore[attr-defined]
    assert "required" in capsys.readouterr().err


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_required_but_wrong_does_not_start(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    monkeypatch.setenv(NAME, "required")
    monkeypatch.setattr(fish_kvcache_attn, "load_error", lambda: None)
    monkeypatch.setattr(fish_kvcache_attn, "self_test", lambda device: error)
    with pytest.raises(FastPathMissing, match="is off by"):
        fish_kvcache_attn.prepare("cuda")
    assert not guard.DECODE.required


def test_a_step_that_the_kernel_cannot_serve_is_counted_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, memory = torch.zeros(1, 2, 16), torch.zeros(1, 1, 16), torch.zeros(2, 1, 16, 16)
    where = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(kernels, "_triton", lambda x: True)  # as on a GPU
    kernels.decode_attention(q.double(), k.double(), k.double(), memory.double(), memory.double(), *where)
    (reason,) = fish_kvcache_attn.status()["fallbacks"]
    assert "float64" in reason
    guard.DECODE.required = True
    with pytest.raises(RuntimeError, match="must run its kernel, but a page table"):
        guard.DECODE.refuse("a page table is odd")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keys": torch.zeros(2, 1, 16, 16).half()}, "cache has torch.float16"),
        ({"q": torch.zeros(1, 2, 24)}, "24 elements"),
        ({"keys": torch.zeros(2, 1, 16, 32)[..., ::2]}, "not contiguous"),
        ({"q": torch.zeros(1, 16, 2).transpose(1, 2)}, "side by side"),
        ({"keys": torch.zeros(2, 3, 16, 16), "values": torch.zeros(2, 3, 16, 16)}, "no multiple of 3"),
    ],
)
def test_what_the_kernels_do_not_take(change: dict[str, torch.Tensor], words: str) -> None:
    taken = {"q": torch.zeros(1, 2, 16), "keys": torch.zeros(2, 1, 16, 16), "values": torch.zeros(2, 1, 16, 16)}
    k = torch.zeros(1, 1, 16)
    assert guard.refusal(k=k, v=k, **taken) == ""
    assert words in guard.refusal(k=k, v=k, **(taken | change))


def test_what_the_kernels_do_not_take_of_pages() -> None:
    pages, table, numbers = torch.zeros(2, 1, 16, 16), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    assert guard.page_refusal(pages, table, numbers, numbers[:1]) == ""
    assert "12 positions" in guard.page_refusal(pages[:, :, :12], table, numbers)
    assert "int32" in guard.page_refusal(pages, table.long(), numbers)
    assert "int32" in guard.page_refusal(pages, table.T, numbers)
    assert "int64" in guard.page_refusal(pages, table, numbers.int())
    assert "int64" in guard.page_refusal(pages, table, numbers[::2])


@no_gpu
def test_the_self_test_compares_the_kernel_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEADS": 2, "KV_HEADS": 1, "DIM": 16, "PAGES": 33}.items():
        monkeypatch.setattr(fish_kvcache_attn, name, value)
    assert 0 < fish_kvcache_attn.self_test("cpu", torch.float32) < 1e-5
