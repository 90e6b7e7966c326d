"""The language model against the reference implementation: every array of `dual_ar.npz`, at its README's tolerance."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from duetts import kernels
from duetts.checkpoint import Model, load_model
from duetts.json_fields import read_json
from duetts.kernels import reference
from duetts.models.blocks import grouped_attention, rope_table
from duetts.models.dual_ar import DualAR, Sampler
from duetts.models.kv_cache import FrameCache, KVCache, SeparateRows
from duetts.models.sampling import PENALTY_WINDOW, RowSampler, SamplingRows
from duetts.types import Sampling

from .arrays import Arrays

LOGITS = 1e-4
TABLE = 1e-6
MARGIN = 1e-4
CPU = torch.device("cpu")


def load(golden_dir: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(golden_dir / "model", device=CPU, dtype=dtype, codec_dtype=torch.float32)


@pytest.fixture(scope="module")
def model(golden_dir: Path) -> DualAR:
    return load(golden_dir).dual_ar


@pytest.fixture(scope="module")
def arrays(golden_dir: Path) -> Arrays:
    return Arrays(golden_dir / "dual_ar.npz")


class Run:
    """One sequence on the model: whole prompt or step by step, then frames."""

    def __init__(self, model: DualAR, rows: int = 1) -> None:
        self.model = model
        weight = model.slow.embeddings.weight
        config = model.config
        self.cache = KVCache(config.slow, rows, config.slow.max_positions, device=CPU, dtype=weight.dtype)
        self.frame_cache = FrameCache(config.fast, rows, device=CPU, dtype=weight.dtype)
        self.position = 0

    def read(self, prompt: Tensor) -> Tensor:
        """Positions [1 + codebooks, n] -> hidden states before the final norm [n, dim]."""
        count = prompt.shape[1]
        rows = SeparateRows(self.cache, [[0]], [self.position], count)
        self.position += count
        return self.model.prefill(prompt[None], rows)[0]

    def step(self, column: Tensor, sampler: Sampler) -> Tensor:
        rows = SeparateRows(self.cache, [[0]], [self.position], 1)
        self.position += 1
        return self.model.next_frame(column[None], rows, self.frame_cache, sampler)[0]


class Greedy:
    """The likeliest of all choices; notes how close a run came to another choice."""

    def __init__(self, allow_end: bool) -> None:
        self.allow_end = allow_end
        self.margin = torch.inf

    def main(self, logits: Tensor) -> Tensor:
        if not self.allow_end:
            logits = logits[:, :-1]
        return self._best(logits)

    def residual(self, book: int, logits: Tensor) -> Tensor:
        return self._best(logits)

    def _best(self, logits: Tensor) -> Tensor:
        top = logits.topk(2).values
        self.margin = min(self.margin, (top[:, 0] - top[:, 1]).min().item())
        return logits.argmax(-1)


def generate(model: DualAR, prompt: Tensor, sampler: Sampler, frames: int) -> Tensor:
    """Frames [1 + codebooks, n], the end's column included."""
    run = Run(model)
    run.read(prompt[:, :-1])
    column, columns = prompt[:, -1], []
    while len(columns) < frames:
        column = run.step(column, sampler)
        columns.append(column)
        if column[0] == model.config.end_id:
            break
    return torch.stack(columns, dim=1)


def with_width(model: DualAR, full: bool) -> DualAR:
    """The same weights, drawing residual codes from all entries of the head or from the codec's only."""
    other = copy(model)
    if full:
        other.residual_width = model.config.fast.vocab_size
    return other


@torch.inference_mode()
def check_prefill(model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    slow = model.slow
    for name in arrays.prefixes("_prefill_logits"):
        prompt = arrays.given(f"{name}_prompt")
        arrays.compare(f"{name}_embed", slow.embed(prompt.T), LOGITS)
        before = Run(model).read(prompt)
        arrays.compare(f"{name}_prefill_hidden_prenorm", before, LOGITS)
        hidden = slow.norm(before)
        arrays.compare(f"{name}_prefill_hidden", hidden, LOGITS)
        logits = hidden @ slow.output_weight.T
        arrays.compare(f"{name}_prefill_logits", logits, LOGITS)
        config = model.config
        allowed = [*range(config.semantic_start, config.semantic_end + 1), config.end_id]
        assert torch.allclose(slow.choice_logits(hidden), logits[:, allowed], atol=1e-5)


@torch.inference_mode()
def check_step_by_step(model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    for name in arrays.prefixes("_step_logits_last4"):
        run = Run(model)
        prompt = arrays.given(f"{name}_prompt")
        hidden = torch.cat([model.slow.norm(run.read(column[:, None])) for column in prompt.T])[-4:]
        arrays.compare(f"{name}_step_hidden_last4", hidden, LOGITS)
        arrays.compare(f"{name}_step_logits_last4", hidden @ model.slow.output_weight.T, LOGITS)


@torch.inference_mode()
def check_fast(model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    fast, width = model.fast, model.config.fast.vocab_size
    for name in arrays.prefixes("_fast_logits"):
        hidden, codes = arrays.given(f"{name}_fast_hidden_in"), arrays.given(f"{name}_fast_codes")
        cache = FrameCache(model.config.fast, len(hidden), device=CPU, dtype=torch.float32)
        logits = [fast.logits(fast(fast.open_frame(hidden, codes[:, 0]), 0, cache), width)]  # positions 0 and 1 at once
        for position in range(2, codes.shape[1]):
            x = fast(fast.embeddings(codes[:, position - 1])[:, None], position, cache)
            logits.append(fast.logits(x, width))
        arrays.compare(f"{name}_fast_logits", torch.cat(logits, dim=1), LOGITS)


@torch.inference_mode()
def check_greedy(model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    endings = ("_greedy_res", "_greedy_full", "_greedy_res_noeos", "_greedy_full_noeos")
    runs = [(prefix, ending) for ending in endings for prefix in arrays.prefixes(ending)]
    assert {ending for _, ending in runs} == set(endings)
    for prefix, ending in runs:
        # Every run has a limit of its own: the length of the recorded one, unless that met the end before.
        longest = arrays.given(prefix + ending).shape[1]
        sampler = Greedy(allow_end="noeos" not in ending)
        frames = generate(with_width(model, "full" in ending), arrays.given(f"{prefix}_prompt"), sampler, longest)
        arrays.compare(prefix + ending, frames)
        if f"{prefix}{ending}_min_margin" in arrays:
            arrays.compare(f"{prefix}{ending}_min_margin", torch.tensor(sampler.margin), MARGIN)


@torch.inference_mode()
def check_sampled_run(model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    """The reference's own loop with its recorded uniforms, through our sampler and its repetition rule."""
    model = with_width(model, full=True)
    config = model.config
    temperature, top_p, top_k = arrays.given("ras_params").tolist()
    rows = SamplingRows.of([Sampling(temperature, top_p, int(top_k))], [0], CPU)
    main = [arrays.given("ras_uniform_A"), arrays.given("ras_uniform_B")]
    residual = arrays.given("ras_uniform_fast")
    tokens = torch.tensor([*range(config.semantic_start, config.semantic_end + 1), config.end_id])
    prompt = arrays.given("ras_prompt")
    run = Run(model)
    run.read(prompt[:, :-1])
    column, columns, draws = prompt[:, -1], [], {0: [], 1: []}
    recent = torch.full((1, PENALTY_WINDOW), -1)
    for frame in range(len(residual)):

        def noise(index: int, ids: Tensor, frame: int = frame) -> Tensor:
            return residual[frame, index - 2][ids] if index > 1 else main[index][frame][tokens[ids]]

        with recorded_noise(noise) as drawn:
            column = run.step(column, RowSampler(rows, torch.tensor([frame]), recent, config.num_semantic))
        columns.append(column)
        for index, values in draws.items():
            values.append(tokens[drawn[index]].item())
        recent = torch.cat((recent[:, 1:], (column[0] - config.semantic_start).view(1, 1)), dim=1)
        if column[0] == config.end_id:
            break
    arrays.compare("ras_frames", torch.stack(columns, dim=1))
    arrays.compare("ras_draw_A", torch.tensor(draws[0]))
    arrays.compare("ras_draw_B", torch.tensor(draws[1]))


@contextmanager
def recorded_noise(noise: Callable[[int, Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Races are run with noise of (draw, ids) instead of the requests' own; gives a list that what was drawn is added to."""
    drawn: list[Tensor] = []
    draw = reference.draw

    def named(seed: Tensor, frame: Tensor, index: int, ranks: int) -> Tensor:
        return torch.full((len(seed), ranks), index)

    def noisy(ordered: Tensor, ids: Tensor, temperature: Tensor, index: Tensor) -> Tensor:
        drawn.append(draw(ordered, ids, temperature, noise(int(index[0, 0]), ids)))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "uniforms", named)
        patch.setattr(reference, "draw", noisy)
        yield drawn


@torch.inference_mode()
def check_rope(model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    slow, fast = model.config.slow, model.config.fast
    for name, decoder in (("slow", slow), ("fast", fast)):
        length = arrays.given(f"rope_{name}_table").shape[0]
        arrays.compare(f"rope_{name}_table", rope_table(torch.arange(length), decoder.head_dim, decoder.rope_base), TABLE)
    assert torch.equal(model.slow.rope, rope_table(torch.arange(slow.max_positions), slow.head_dim, slow.rope_base))
    assert torch.equal(model.fast.rope, rope_table(torch.arange(fast.max_positions), fast.head_dim, fast.rope_base))
    table = rope_table(arrays.given("rope_pos"), slow.head_dim, slow.rope_base)
    x = arrays.given("rope_x")
    turned, _, _ = kernels.norm_rotate(
        torch.cat((x, x, x), dim=2).flatten(2), x.shape[2], x.shape[2], None, None, 0.0, table[None]
    )
    arrays.compare("rope_y", turned, LOGITS)
    arrays.compare("rope_s2_table_bf16", rope_table(arrays.given("rope_s2_pos"), 128, 1e6), TABLE)


@torch.inference_mode()
def check_layer(model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    layer, slow = model.slow.layers[0], model.config.slow
    x = arrays.given("l0_in")[None]
    rope = rope_table(torch.arange(x.shape[1]), slow.head_dim, slow.rope_base)[None]
    attend = partial(grouped_attention, mask=None, causal=True)
    normed = layer.attention_norm(x)
    arrays.compare("l0_attn_norm", normed[0], LOGITS)
    arrays.compare("l0_attn_out", layer.attention(normed, rope, attend)[0], LOGITS)
    arrays.compare("l0_out", layer(x, rope, attend)[0], LOGITS)


@torch.inference_mode()
def check_filter(model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    logits = arrays.given("samp_logits")[None]
    names = [name for name in arrays.names if name.startswith("samp_params_")]
    assert names
    for name in names:
        temperature, top_p, top_k = arrays.given(name).tolist()
        ordered, ids = reference.candidates(logits, torch.tensor([top_p]), torch.tensor([int(top_k)]), logits.shape[1])
        tempered = torch.tensor([temperature])
        probabilities = torch.zeros_like(logits).scatter(1, ids, (ordered / tempered.clamp(min=1e-5)[:, None]).softmax(-1))
        arrays.compare(name.replace("params", "probs"), probabilities[0], 1e-6)
        even = torch.full_like(ordered, 0.5)  # equal noise everywhere: the race is won by the likeliest
        assert reference.draw(ordered, ids, tempered, even)[0] == logits.argmax()


@torch.inference_mode()
def check_bfloat16(model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    """Our bfloat16 run may lie no further from float32 than 1.5 times what the reference's own does."""
    half = load(golden_dir, torch.bfloat16).dual_ar
    for name in arrays.prefixes("_bf16_prefill_logits_last"):
        exact = arrays.given(f"{name}_prefill_logits")[-1]
        theirs = (arrays.given(f"{name}_bf16_prefill_logits_last") - exact).abs()
        hidden = half.slow.norm(Run(half).read(arrays.given(f"{name}_prompt")))[-1]
        ours = ((hidden @ half.slow.output_weight.T).float() - exact).abs()
        assert ours.max() <= 1.5 * theirs.max()
        assert ours.mean() <= 1.5 * theirs.mean()


CHECKS = (
    check_prefill, check_step_by_step, check_fast, check_greedy, check_sampled_run, check_rope, check_layer, check_filter,
    check_bfloat16,
)  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_against_reference(check, model: DualAR, arrays: Arrays, golden_dir: Path) -> None:
    check(model, arrays, golden_dir)


def test_no_array_is_left_out(model: DualAR, golden_dir: Path) -> None:
    fresh = Arrays(golden_dir / "dual_ar.npz")
    for check in CHECKS:
        check(model, fresh, golden_dir)
    assert fresh.names - fresh.used == set()


def test_config_names_the_same_tokens(model: DualAR, golden_dir: Path) -> None:
    tokens = read_json(golden_dir / "model" / "tiny_tokens.json")
    config = model.config
    assert config.end_id == tokens["special_ids"]["<|im_end|>"]
    assert (config.semantic_start, config.semantic_end) == (tokens["semantic_begin_id"], tokens["semantic_end_id"])
    assert (config.slow.vocab_size, model.residual_width) == (tokens["vocab_size"], tokens["residual_codebook_size"])


def test_rounding_at_top_p_1_drops_the_same_tail() -> None:
    """With top_p 1 the running sum passes 1 by rounding alone; the reference drops what follows, so we do too."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 128, generator=generator)
    sorted_logits = logits.sort(descending=True).values
    dropped = sorted_logits.softmax(-1).cumsum(-1) > 1.0
    assert dropped.any()
    ordered, _ = reference.candidates(logits, torch.ones(200), torch.full((200,), 128), 128)
    assert torch.equal(ordered, sorted_logits.masked_fill(dropped, -torch.inf))


@torch.inference_mode()
def test_code_at_the_end_is_the_clamped_distance(model: DualAR) -> None:
    """As in the reference, wherever the end token lies: 0 below the semantic tokens, the last code above them."""

    class Ending(Greedy):
        def main(self, logits: Tensor) -> Tensor:
            return torch.full(logits.shape[:1], logits.shape[1] - 1)

    config = model.config
    prompt = torch.zeros(1 + config.num_codebooks, 2, dtype=torch.long)
    last_code = config.fast.vocab_size - 1
    ends = [(config.semantic_start + last_code + 1, last_code)]
    if config.semantic_start > 0:
        ends.append((config.semantic_start - 1, 0))
    for end, code in ends:
        other = copy(model)
        other.config = replace(config, end_id=end, slow=replace(config.slow, vocab_size=config.slow.vocab_size + end + 1))
        assert generate(other, prompt, Ending(allow_end=True), 1)[:2, 0].tolist() == [end, code]
