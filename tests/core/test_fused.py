"""Distributions and draws by `fused.c`, held to torch in float64 and to their definitions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from truedraft.core import fused
from truedraft.core import probs as L
from truedraft.core.params import SamplingParams

pytestmark = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")

SIZES = (1, 3, 16, 20, 511, 513, 4099)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("temperature", [1e-30, 0.3, 1.0, 2.5])
def test_softmax_is_that_of_float64(vocab: int, temperature: float) -> None:
    logits = drawn(5, vocab)
    logits[1, vocab // 2] = -torch.inf
    logits[0], logits[2, 0] = logits[0] + 1e4, 60.0
    assert fused.fit(logits)
    params = SamplingParams(temperature=temperature)
    found = L.probs_from_logits(logits, params)
    shifted = logits.double() - logits.double().amax(-1, keepdim=True)
    wanted = torch.softmax(shifted / temperature, -1)
    if vocab == 1:
        wanted[1] = torch.nan
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-30, equal_nan=True)
    alone = torch.cat([L.probs_from_logits(row[None], params) for row in logits])
    assert torch.equal(found.nan_to_num(2.0), alone.nan_to_num(2.0)), "a row does not depend on the others"
    halves = logits.bfloat16()
    both = [L.probs_from_logits(each, params).nan_to_num(2.0) for each in (halves, halves.float())]
    assert torch.equal(*both)


@pytest.mark.parametrize("dtype", fused.LOGITS, ids=str)
@pytest.mark.parametrize("vocab", [1, 17, 515, 2048])
def test_token_probs_are_entries_of_the_softmax(vocab: int, dtype: torch.dtype) -> None:
    logits = (5.0 * drawn(4, vocab)).to(dtype)
    logits[1, :] += 60.0
    logits[3, -1] = torch.nan
    tokens = torch.tensor([0, vocab - 1, vocab, 0])
    found = fused.token_probs(logits, tokens)
    wanted = torch.softmax(logits.double(), -1)
    assert found[:3].tolist() == pytest.approx([float(wanted[0, 0]), float(wanted[1, -1]), 0.0], rel=1e-5)
    assert found[3].isnan()


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("dtype", fused.LOGITS)
def test_the_largest_entry_is_the_first_of_equal_ones_or_the_first_nan(vocab: int, dtype: torch.dtype) -> None:
    """As numpy has it, with zeros of both signs equal; a row does not depend on the others."""
    rows = drawn(9, vocab, seed=5).to(dtype)
    rows[1], rows[2], rows[3] = rows[1].round(), -rows[2].abs().round(), 0.0
    rows[2, ::3], rows[3, ::2] = -0.0, -0.0
    rows[4], rows[5, -1] = -torch.inf, torch.inf
    rows[6, vocab // 2 :], rows[7, -1], rows[8] = torch.nan, -torch.tensor(torch.nan), torch.nan
    entries, places = fused.largest(rows)
    wanted = rows.float().numpy().argmax(-1)
    assert places.tolist() == wanted.tolist() == L.most_likely(rows).tolist()
    assert np.array_equal(entries.numpy(), rows.double().numpy()[np.arange(9), wanted], equal_nan=True)
    sound = L.sound_rows(rows)
    assert sound is not None and sound.tolist() == [True] * 4 + [False] * 5
    assert L.sound_rows(rows[:4]) is None
    assert torch.equal(torch.cat([fused.largest(row[None])[1] for row in rows]), places)


def test_a_program_with_another_default_dtype_gets_the_same() -> None:
    logits, params = drawn(3, 20), SamplingParams(temperature=0.7)
    usual = L.probs_from_logits(logits, params)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(L.probs_from_logits(logits, params), usual)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_a_distribution_are_nan(vocab: int, wrong: float) -> None:
    for place in {0, vocab // 2, vocab - 1}:
        logits = drawn(3, vocab)
        logits[1, place] = wrong
        if wrong == -torch.inf:
            logits[1] = wrong
        found = fused.softmax(logits, torch.tensor([1.0, 0.7, 1.3]))
        assert found[1].isnan().all() and found[[0, 2]].isfinite().all()
        assert fused.draw(found, torch.full((3,), 0.5, dtype=torch.float64)).tolist()[1] == vocab


@pytest.mark.parametrize("vocab", SIZES)
def test_draws_are_where_the_cumulative_sum_crosses(vocab: int) -> None:
    """Token by token, with numbers inside of each cell, at its ends, and just below 1; never a token of mass 0."""
    weights = drawn(1, vocab, seed=2).exp()
    weights[0, ::3] = 0.0
    weights[0, -1] = max(float(weights[0, -1]), 0.5)
    cumulative = weights.double().cumsum(-1)[0]
    below = cumulative - weights[0].double()
    some = np.unique(np.linspace(0, vocab - 1, 40).astype(int)).tolist()
    for token in (each for each in some if weights[0, each] > 0.0):
        middle = float((below[token] + cumulative[token]) / 2 / cumulative[-1])
        assert fused.draw(weights, torch.tensor([middle], dtype=torch.float64)).tolist() == [token]
    last = fused.draw(weights.expand(3, -1), torch.tensor([0.0, 1.0 - 2.0**-53, 1.0], dtype=torch.float64)).tolist()
    first = int((weights[0] > 0.0).nonzero()[0])
    assert last == [first, vocab - 1, vocab - 1]
    assert fused.draw(torch.zeros(2, vocab), torch.rand(2, dtype=torch.float64)).tolist() == [vocab, vocab]
    exact = torch.zeros(1, vocab)
    exact[0, -1] = 0.8
    exact[0, 0] += 0.2
    at = [0] if vocab == 1 else [vocab - 1]
    assert fused.draw(exact, torch.tensor([0.2000001], dtype=torch.float64)).tolist() == at


def test_frequencies_of_draws() -> None:
    weights = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.0, 0.3])
    numbers = (torch.arange(6000, dtype=torch.float64) + 0.5) / 6000
    counts = torch.bincount(fused.draw(weights.expand(6000, -1), numbers), minlength=7)
    assert (counts[:6] - 6000 * weights).abs().max() <= 1 and counts[6] == 0


@pytest.mark.parametrize("vocab", SIZES)
def test_what_is_left_of_p(vocab: int) -> None:
    p, q = (torch.softmax(drawn(4, vocab, seed=seed), -1) for seed in (1, 2))
    q[2] = p[2]
    p[3], q[3] = torch.nn.functional.one_hot(torch.tensor(0), vocab).float(), 2.0 / vocab
    found = L.residual(p, q)
    wanted = (p.double() - q.double()).clamp_min(0.0)
    mass = wanted.sum(-1, keepdim=True)
    wanted = torch.where(mass > 0.0, wanted / mass.clamp_min(1e-300), p.double())
    torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-9)
    assert torch.equal(found[2], p[2]) and torch.equal(L.residual(p[0], q[0]), found[0])
    assert torch.equal(L.residual(p.double(), q.double())[0], L.residual(p[0].double(), q[0].double()))


def test_what_does_not_fit_is_left_to_torch() -> None:
    rows = drawn(2, 7)
    assert not fused.fit(rows.double()) and not fused.fit(rows, rows[:1]) and not fused.fit(rows[:0])
    assert not fused.fit(rows.bfloat16()) and fused.fit(rows, rows[:, :7])


@pytest.mark.parametrize("vocab", SIZES)
def test_sums_and_least_entries(vocab: int) -> None:
    rows = drawn(6, vocab)
    rows[1, -1], rows[2, 0], rows[3, -1] = torch.nan, torch.inf, -9.0
    sums, least = fused.sums_and_least(rows)
    torch.testing.assert_close(sums, rows.double().sum(-1).float(), rtol=1e-4, atol=1e-4, equal_nan=True)
    others = [0, 2, 3, 4, 5]
    assert torch.equal(least[others], rows.amin(-1)[others])


_PROGRAM = """#include "fused.c"
#include <stdio.h>
int main(void) {
    static float logits[3 * 515], probs[3 * 515], left[515], sums[2];
    const float temperature[3] = {0.7f, 1.0f, 1.9f};
    const double uniform[3] = {0.1, 0.5, 0.99};
    int64_t tokens[3];
    for (int i = 0; i < 3 * 515; i++) logits[i] = (float)(i * 7919 % 1009) / 100.0f - 5.0f;
    truedraft_softmax(logits, 3, 515, temperature, probs);
    truedraft_draw(probs, 3, 515, uniform, tokens);
    truedraft_residual(probs, 1, 515, probs + 515, left);
    truedraft_sums(probs, 1, 515, 0, sums);
    for (int i = 0; i < 3 * 515; i++) printf("%.9g ", probs[i]);
    for (int i = 0; i < 515; i++) printf("%.9g ", left[i]);
    printf("%.9g %.9g %d %d %d", sums[0], sums[1], (int)tokens[0], (int)tokens[1], (int)tokens[2]);
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", [("gcc", "-march=native", "-mno-avx"), ("aarch64-linux-gnu-gcc", "-static")], ids=["sse", "aarch64"]
)
def test_other_processors_give_the_same_up_to_the_order_of_sums(compiler: tuple[str, ...], tmp_path: Path) -> None:
    runner = ["qemu-aarch64"] if compiler[0].startswith("aarch64") else []
    if any(shutil.which(name) is None for name in (compiler[0], *runner)):
        pytest.skip(f"needs {' and '.join((compiler[0], *runner))}")
    (tmp_path / "program.c").write_text(_PROGRAM)
    found = []
    for command in (("gcc", "-march=native"), compiler):
        program = [str(tmp_path / "program.c"), f"-I{Path(fused.__file__).parent}", "-lm", "-o", str(tmp_path / "made")]
        subprocess.run([*command, "-O3", "-std=gnu11", *program], check=True, timeout=100)
        made = [*(runner if command is compiler else ()), str(tmp_path / "made")]
        printed = subprocess.run(made, check=True, timeout=100, capture_output=True, text=True).stdout
        found.append(np.array(printed.split(), np.float64))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-9)  # differences of nearly equal numbers
    assert len(found[0]) == 4 * 515 + 5 and np.array_equal(found[0][-3:], found[1][-3:])
