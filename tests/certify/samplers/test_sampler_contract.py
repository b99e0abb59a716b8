"""What a sampler is given, what it may give back, and one sentence where it gives something else."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from truedraft.certify.samplers import Sampler, load_sampler
from truedraft.certify.samplers.worlds import SamplerWorld, sampler_worlds
from truedraft.errors import DataError, OptionError


@pytest.fixture(scope="module")
def world() -> SamplerWorld:
    return next(each for each in sampler_worlds() if each.drafted == 2 and each.vocab == 3)


def emit(world: SamplerWorld, function: Callable[..., Any], seed: int = 5, batch: int = 6) -> Tensor:
    rows = world.rows(batch, torch.Generator().manual_seed(1))
    return Sampler.of(function, "own:f").emit(rows, seed)


def test_arguments_are_given_by_name(world: SamplerWorld) -> None:
    seen: dict[str, Any] = {}

    def everything(
        generator: torch.Generator,
        uniforms: Tensor,
        target_logits: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor,
        draft_tokens: Tensor,
        scale: float = 1.0,
        *more: int,
        **others: int,
    ) -> Tensor:
        seen.update(locals())
        return torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)

    out = emit(world, everything)
    assert torch.equal(out[:, :2], seen["draft_tokens"])
    assert out[:, 2].tolist() == [-1] * 6
    assert seen["draft_probs"].shape == (6, 2, 3) and seen["draft_probs"].dtype == torch.float32
    assert seen["target_probs"].shape == (6, 3, 3) and seen["target_probs"].dtype == torch.float32
    assert torch.allclose(seen["target_logits"].softmax(-1), seen["target_probs"])
    assert seen["uniforms"].shape == (6, 5) and seen["uniforms"].dtype == torch.float64
    assert seen["others"] == {} and seen["scale"] == 1.0
    drafted = seen["draft_probs"].gather(-1, seen["draft_tokens"][..., None])
    assert bool((drafted > 0.0).all())


def test_global_states_are_seeded_and_left_as_they_were(world: SamplerWorld) -> None:
    drawn: list[tuple[float, float, float]] = []

    def globally(draft_tokens: Tensor, target_probs: Tensor) -> list[list[int]]:
        drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))
        return [[0]] * len(draft_tokens)

    torch.manual_seed(0)
    random.seed(0)
    before = torch.random.get_rng_state(), random.getstate()
    for seed in (5, 5, 6):
        emit(world, globally, seed)
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(before[0], torch.random.get_rng_state()) and before[1] == random.getstate()


@pytest.mark.parametrize(
    "given",
    [
        [[0], [1, 2], [0, 1, 2], [2], [2], [1]],
        [torch.tensor([0]), [1, 2], [0, 1, 2], [2], [2], [1]],
        torch.tensor([[0, -1, -1], [1, 2, -1], [0, 1, 2], [2, -1, -1], [2, -1, -1], [1, -1, -1]], dtype=torch.int32),
        np.array([[0, -1, -1], [1, 2, -1], [0, 1, 2], [2, -1, -1], [2, -1, -1], [1, -1, -1]]),
        np.array([[-1, -1, 0], [-1, 2, 1], [2, 1, 0], [-1, -1, 2], [-1, -1, 2], [-1, -1, 1]])[:, ::-1],
    ],
)
def test_tokens_in_every_form(world: SamplerWorld, given: Any) -> None:
    out = emit(world, lambda draft_tokens, target_probs: given)
    assert out.tolist() == [[0, -1, -1], [1, 2, -1], [0, 1, 2], [2, -1, -1], [2, -1, -1], [1, -1, -1]]
    assert out.dtype == torch.int64


def always(given: Any) -> Callable[..., Any]:
    return lambda draft_tokens, target_probs: given


def test_what_is_no_answer_is_refused(world: SamplerWorld) -> None:
    for given, words in (
        (None, "gave back a NoneType; give tokens [batch, k + 1] = [6, 3]"),
        (torch.zeros(6, 2, dtype=torch.int64), "gave back the shape [6, 2]"),
        (torch.full((6, 3), torch.nan), "gave back NaN where ids are wanted"),
        (torch.zeros(6, 3), "gave back numbers of torch.float32"),
        (torch.zeros(6, 3, dtype=torch.complex64), "gave back numbers of torch.complex64"),
        (torch.zeros(6, 3, dtype=torch.bool), "gave back numbers of torch.bool"),
        (np.zeros((6, 3), dtype=bool), "gave back numbers of torch.bool"),
        (np.zeros((6, 3), dtype=object), "gave back an array of object where ids are wanted"),
        (np.full((6, 3), "x"), "gave back an array of <U1 where ids are wanted"),
        ([[torch.zeros(1, requires_grad=True)]] * 6, "for row 0"),
        ([[True]] * 6, "gave back [True] for row 0"),
        (torch.full((6, 3), 3), "emitted the id 3; there are 0 to 2"),
        (torch.full((6, 3), -2), "emitted the id -2"),
        (torch.full((6, 3), -1), "emitted nothing for row 0"),
        (torch.tensor([[0, -1, 1]] * 6), "gave a token behind a -1"),
        ([[0]] * 5, "gave back 5 rows for 6"),
        ([[0, 1, 2, 0]] * 6, "gave back [0, 1, 2, 0] for row 0"),
        ([[0.5]] * 6, "gave back [0.5] for row 0"),
        ([[[0], [1, 2]]] * 6, "for row 0"),
        ([0] * 6, "gave back 0 for row 0"),
    ):
        with pytest.raises(OptionError) as caught:
            emit(world, always(given))
        assert words in str(caught.value)
        assert caught.value.field == "sampler"
        assert "\n" not in str(caught.value)


def test_failures_say_where(world: SamplerWorld) -> None:
    def fails(draft_tokens: Tensor, target_probs: Tensor) -> Tensor:
        raise KeyError("no such thing")

    def refuses(draft_tokens: Tensor, target_probs: Tensor) -> Tensor:
        raise DataError("there is no table")

    with pytest.raises(OptionError, match=r"'own:f': failed \(KeyError: 'no such thing', line \d+ of test_sampler_con"):
        emit(world, fails)
    with pytest.raises(OptionError, match="'own:f': there is no table"):
        emit(world, refuses)
    with pytest.raises(OptionError, match=r"'own:f': failed \(SystemExit: 0"):
        emit(world, lambda draft_tokens, target_probs: sys.exit(0))


def test_what_is_no_sampler_is_refused() -> None:
    for function, words in (
        (3, "is a int; name a function"),
        (dict, "no readable parameters|must take draft_tokens"),
        (lambda draft_tokens, target_prob: None, "asks for 'target_prob'; did you mean 'target_probs'?"),
        (lambda draft_tokens, temperature: None, "what can be asked for: draft_tokens, draft_probs"),
        (lambda draft_tokens: None, "must take draft_tokens, and target_probs or target_logits"),
        (lambda target_probs: None, "must take draft_tokens"),
        (lambda draft_tokens, /, target_probs: None, "takes 'draft_tokens' by position alone"),
    ):
        with pytest.raises(OptionError, match=words):
            Sampler.of(function, "own:f")


def test_a_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_sampler_of_mine.py").write_text(
        "class Mine:\n    @staticmethod\n    def judge(draft_tokens, target_probs):\n        return draft_tokens\n"
    )
    (tmp_path / "a_broken_sampler.py").write_text("import no_such_library\n")
    (tmp_path / "a_failing_sampler.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    assert load_sampler("a_sampler_of_mine:Mine.judge").parameters == ("draft_tokens", "target_probs")
    for spec, words in {
        "a_sampler_of_mine:Mine.juge": "did you mean 'judge'",
        "a_broken_sampler:f": "cannot be imported (No module named 'no_such_library')",
        "a_failing_sampler:f": "cannot be imported (ZeroDivisionError: division by zero)",
        "nowhere.at_all:f": "names no module that there is, 'nowhere.at_all'",
        "a_sampler_of_mine": "must be module:function, got 'a_sampler_of_mine'",
        "a b:c": "must be module:function",
    }.items():
        with pytest.raises(OptionError) as caught:
            load_sampler(spec)
        assert words in str(caught.value)
