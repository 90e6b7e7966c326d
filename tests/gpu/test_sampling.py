"""Embedding and draws on a GPU at S2 Pro's sizes: the same as the twins on a CPU, alone, in company and in CUDA graphs."""

from typing import Any

import pytest
import torch

from duetts import kernels
from duetts.kernels import reference

pytestmark = pytest.mark.gpu
frame = pytest.importorskip("duetts.kernels.frame")

DEVICE = torch.device("cuda")
END = 4096
ROWS = 256
# Sums round otherwise on a GPU, and what lies at a cut may then fall on its other side.
FEW = 3


class Rows:
    """Rows with all kinds of sampling values and logits, every third of them rounded so that many are equal."""

    def __init__(self, choices: int, dtype: torch.dtype, rows: int = ROWS, seed: int = 1) -> None:
        dice = torch.Generator().manual_seed(seed)

        def among(*values: float) -> torch.Tensor:
            return torch.tensor(values)[torch.randint(len(values), (rows,), generator=dice)]

        logits = torch.randn(rows, choices, generator=dice) * among(0.3, 2.0, 6.0)[:, None]
        logits[::3] = logits[::3].round()
        self.logits = logits.to(dtype)
        self.recent = torch.randint(-1, choices, (rows, 16), generator=dice)
        self.recent[::2, ::3] = self.logits.argmax(1)[::2, None]
        self.frame, self.seed = (
            torch.randint(40, (rows,), generator=dice),
            torch.randint(-(1 << 62), 1 << 62, (rows,), generator=dice),
        )
        self.temperature, self.top_p, self.penalty = among(0.0, 0.7, 1.0), among(0.5, 0.8, 0.95), among(1.0, 1.0, 1.2)
        self.top_k = among(1, 30, 50, 64, 200, 0).long()

    def main(self, how: Any, device: torch.device, rows: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        values = (self.logits, self.recent, self.frame, self.seed, self.temperature, self.top_p, self.top_k, self.penalty)
        choice, sound = how(*(value[rows].to(device) for value in values), self.logits.shape[1] - 1)
        return choice.cpu(), sound.cpu()

    def residual(self, how: Any, book: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        values = (self.logits, self.frame, self.seed, self.temperature, self.top_p, self.top_k)
        code, sound = how(book, *(value.to(device) for value in values))
        return code.cpu(), sound.cpu()


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@torch.inference_mode()
def test_draws_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    rows = Rows(END + 1, dtype)
    found, sound = rows.main(kernels.sample_main, DEVICE)
    assert sound.all()
    assert (found != rows.main(reference.sample_main, CPU)[0]).sum() <= FEW
    for width in (1024, 4096, 1000):
        rows = Rows(width, dtype)
        for book in (1, 9):
            found, sound = rows.residual(kernels.sample_residual, book, DEVICE)
            assert sound.all()
            assert (found != rows.residual(reference.sample_residual, book, CPU)[0]).sum() <= FEW


@torch.inference_mode()
def test_greedy_rows_take_the_first_of_the_largest() -> None:
    rows = Rows(END + 1, torch.bfloat16)
    rows.penalty[:], rows.temperature[:] = 1.0, 0.0
    assert torch.equal(
        rows.main(kernels.sample_main, DEVICE)[0], rows.logits.float().sort(dim=1, descending=True, stable=True)[1][:, 0]
    )


@torch.inference_mode()
def test_a_row_does_not_depend_on_its_company() -> None:
    rows = Rows(END + 1, torch.bfloat16)
    together, _ = rows.main(kernels.sample_main, DEVICE)
    for one in (slice(0, 1), slice(100, 103), slice(17, 81)):
        assert torch.equal(rows.main(kernels.sample_main, DEVICE, one)[0], together[one])


@torch.inference_mode()
def test_logits_that_are_not_finite_are_told() -> None:
    rows = Rows(END + 1, torch.bfloat16, rows=4)
    rows.logits[0, END], rows.logits[1, 5], rows.logits[2] = float("nan"), float("inf"), float("-inf")
    choice, sound = rows.main(kernels.sample_main, DEVICE)
    assert sound.tolist() == [False, False, False, True]
    assert ((choice >= 0) & (choice <= END)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@torch.inference_mode()
def test_embedding(dtype: torch.dtype) -> None:
    embeddings = torch.randn(9000, 2560, device=DEVICE).to(dtype)
    codes = torch.randn(10 * 4096, 2560, device=DEVICE).to(dtype)
    for rows in (1, 17, 256):
        columns = torch.cat((torch.randint(9000, (rows, 1)), torch.randint(4096, (rows, 10))), dim=1).to(DEVICE)
        for each in (columns, columns.T.contiguous().T):
            for divisor in (11**0.5, 1.0):
                expected = reference.embed_frame(each, embeddings, codes, 4000, 8095, divisor)
                found = kernels.embed_frame(each, embeddings, codes, 4000, 8095, divisor)
                torch.testing.assert_close(found, expected, rtol=1.6e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-3)


@torch.inference_mode()
def test_recorded_draws_are_those_of_the_moment() -> None:
    """In a CUDA graph with the frame's number on the device: every replay draws what an ordinary call draws."""
    rows = Rows(END + 1, torch.bfloat16, rows=8)
    names = ("logits", "recent", "frame", "seed", "temperature", "top_p", "top_k", "penalty")
    values = [vars(rows)[name].to(DEVICE) for name in names]
    logits, number = values[0], values[2]

    def draws() -> torch.Tensor:
        main, _ = kernels.sample_main(*values, END)
        codes = [kernels.sample_residual(book, logits[:, :1024], *values[2:7])[0] for book in range(1, 10)]
        return torch.stack((main, *codes))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        draws()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = draws()
    seen = []
    for _ in range(3):
        number += 1
        logits.copy_(torch.randn(*logits.shape, device=DEVICE))
        graph.replay()
        seen.append(recorded.clone())
        assert torch.equal(seen[-1], draws())
    assert not torch.equal(seen[0], seen[1])
