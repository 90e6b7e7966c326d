"""Embedding and draws: Triton in its interpreter against the twins; the rules are in tests/models/test_sampling.py."""

from typing import Any

import pytest
import torch

from duetts.kernels import frame, reference


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("dtype", "divisor"), [(torch.float32, 3.3), (torch.float16, 3.3), (torch.float16, 1.0)])
def test_embedding_is_the_twin(dtype: torch.dtype, divisor: float) -> None:
    columns = torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(1))
    columns[0] = torch.tensor([3, 20, 28, 29, 11])
    embeddings, codes = draw(40, 37, dtype=dtype), draw(21, 37, seed=1, dtype=dtype)
    for each in (columns.T, columns.T.contiguous()):
        expected = reference.embed_frame(each, embeddings, codes, 20, 28, divisor)
        torch.testing.assert_close(frame.embed_frame(each, embeddings, codes, 20, 28, divisor), expected, rtol=1e-6, atol=1e-6)


class Rows:
    """Five ways to draw, which between them use every rule."""

    temperature = torch.tensor([0.0, 0.7, 1.5, 1e-6, 1.0])
    top_p = torch.tensor([0.8, 0.9, 0.999, 0.8, 0.5])
    top_k = torch.tensor([30, 0, 70, 1, 9999])
    penalty = torch.tensor([1.0, 1.3, 1.0, 2.0, 1.0])
    seed = torch.tensor([1, -2, 1 << 62, 3, -(1 << 63)])
    frame = torch.tensor([0, 4, 12, 3, 30])

    def __init__(self, choices: int, dtype: torch.dtype, scale: float, ties: bool) -> None:
        logits = draw(5, choices) * scale
        self.logits = (logits.round() if ties else logits).to(dtype)
        self.recent = torch.full((5, 16), -1)
        self.recent[1:, 2:] = torch.randint(0, choices, (4, 14), generator=torch.Generator().manual_seed(2))
        self.recent[1:, ::3] = self.logits.argmax(1)[1:, None]  # so that the first draw is a repetition
        self.end = choices - 1

    def main(self, how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.frame, self.seed, self.temperature, self.top_p, self.top_k, self.penalty
        found: tuple[torch.Tensor, torch.Tensor] = how(self.logits, self.recent, *values, self.end)
        return found

    def residual(self, how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = how(
            3, self.logits, self.frame, self.seed, self.temperature, self.top_p, self.top_k
        )  # fmt: skip
        return found


@pytest.mark.parametrize(
    ("choices", "dtype", "scale", "ties"),
    [
        (5, torch.float32, 1.0, False),
        (65, torch.float32, 2.0, False),  # one more than a round of candidates
        (130, torch.float16, 1.5, True),  # equal logits stay in the order of ids; the last two are sorted apart from 128
        (200, torch.float32, 0.1, False),  # nearly uniform: the second row needs several rounds
    ],
)
def test_draws_are_the_twins(choices: int, dtype: torch.dtype, scale: float, ties: bool) -> None:
    rows = Rows(choices, dtype, scale, ties)
    expected = rows.main(reference.sample_main)
    assert torch.equal(rows.main(frame.sample_main)[0], expected[0])
    assert expected[1].all()
    assert torch.equal(rows.residual(frame.sample_residual)[0], rows.residual(reference.sample_residual)[0])


def test_a_logit_that_is_not_finite_is_told_and_draws_stay_within_the_choices() -> None:
    rows = Rows(70, torch.float32, 1.0, False)
    rows.logits[1, 69], rows.logits[2], rows.logits[4, 3] = float("nan"), float("-inf"), float("inf")
    choices, sound = rows.main(frame.sample_main)
    assert sound.tolist() == [True, False, False, True, False]
    assert ((choices >= 0) & (choices < 70)).all()
    assert torch.equal(sound, rows.main(reference.sample_main)[1])
    assert rows.residual(frame.sample_residual)[1].tolist() == sound.tolist()


def test_a_row_draws_the_same_in_other_company() -> None:
    rows = Rows(65, torch.float32, 1.0, False)
    together = rows.main(reference.sample_main)[0]
    for row in range(5):
        one = slice(row, row + 1)
        values = (Rows.frame, Rows.seed, Rows.temperature, Rows.top_p, Rows.top_k, Rows.penalty)
        alone, _ = reference.sample_main(rows.logits[one], rows.recent[one], *(value[one] for value in values), rows.end)
        assert alone == together[row]


def test_penalty_of_choice_0_does_not_depend_on_free_places() -> None:
    """Free places (-1) must not be taken for choice 0, whose logit another place lowers."""
    logits = torch.tensor([[2.0, 1.0, -1.0]])
    lowered = reference.penalise(logits, torch.tensor([[0, 2, -1, -1]]), torch.tensor([2.0]))
    assert lowered.tolist() == [[1.0, 1.0, -2.0]]
