"""Forwards take one thread while more are slower, and all of them again; by a clock that a made-up machine turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from support.backends import fused_backend, llama_of, native_backend
from support.tiny_models import build, llama
from truedraft import Engine, SamplingParams
from truedraft.core.tree import chain_shape
from truedraft.models import HuggingFaceModel, Segment
from truedraft.models.attention import Full
from truedraft.models.backends.base import BackendMaker
from truedraft.models.backends.fused import FusedBackend
from truedraft.models.backends.native import NativeBackend
from truedraft.models.backends.stock import StockBackend
from truedraft.models.loading import fastest_backend
from truedraft.models.packed_linear import can_pack
from truedraft.models.threads import ThreadChoice, forward_threads, torch_on_all_threads, torch_on_one_thread


class Machine:
    """Forwards take what it says, on one thread and on all; counts them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.one_s = 2.0
        self.all_s: Callable[[int], float] = lambda number: 1.0
        self.on_one = self.on_all = 0
        self.choice = ThreadChoice(lambda: self.now)

    def forwards(self, count: int, rows: int = 1) -> float:
        """The mean seconds of so many."""
        began = self.now
        for _ in range(count):
            self.choice.run(rows, self._forward)
        return (self.now - began) / count

    def _forward(self) -> None:
        if torch.get_num_threads() == 1:
            self.on_one += 1
            self.now += self.one_s
        else:
            self.on_all += 1
            self.now += self.all_s(self.on_all)


@pytest.fixture
def machine() -> Iterator[Machine]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield Machine()
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_an_idle_machine_keeps_all_threads(machine: Machine) -> None:
    machine.forwards(1000)
    assert machine.on_one == 2 + 5
    machine.all_s = lambda number: 40.0 if number % 50 == 0 else 1.0  # a hiccup now and then is no busy core
    machine.forwards(1000)
    assert machine.on_one == 2 + 10


@pytest.mark.parametrize("slow_s", [2.5, 10.0, 60.0])
def test_beside_another_program_nearly_all_is_as_fast_as_on_one_thread(machine: Machine, slow_s: float) -> None:
    machine.forwards(50)
    machine.all_s = lambda number: slow_s
    machine.forwards(12)  # until it is seen
    assert machine.forwards(2000) < machine.one_s / 0.93


def test_a_second_thread_that_comes_late_every_fourth_time_is_not_believed(machine: Machine) -> None:
    """Most forwards are fast then, and some in a row are no rarity."""
    machine.forwards(50)
    machine.all_s = lambda number: 30.0 if number % 4 == 0 else 1.0
    machine.forwards(100)
    assert machine.forwards(4000) < machine.one_s / 0.9


def test_all_threads_are_taken_again_when_the_core_is_free(machine: Machine) -> None:
    machine.forwards(50)
    machine.all_s = lambda number: 10.0
    machine.forwards(100)
    machine.all_s = lambda number: 1.0
    machine.forwards(150)
    assert machine.forwards(100) < 1.05


def test_long_parts_of_prompts_keep_all_threads(machine: Machine) -> None:
    """Their bits may depend on the number; see the module."""
    machine.forwards(50, rows=256)
    machine.all_s = lambda number: 10.0
    machine.forwards(30)
    before = machine.on_one
    machine.forwards(20, rows=33)
    assert machine.on_one == before


def test_a_forward_that_fails_gives_torch_its_threads_back(machine: Machine) -> None:
    machine.all_s = lambda number: 10.0
    machine.forwards(40)

    def broken() -> None:
        assert torch.get_num_threads() == 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        machine.choice.run(1, broken)


@pytest.mark.parametrize("backend", [fused_backend, fastest_backend])
def test_bits_are_the_same_on_any_number_of_threads(backend: BackendMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backend says so; the second is the model's own modules with packed weights."""
    if not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("this processor has no packed products of this kind")
    monkeypatch.setattr(NativeBackend, "fits", staticmethod(lambda *_: False))
    monkeypatch.setattr(FusedBackend, "fits", staticmethod(lambda *_: False))
    config = llama(vocab_size=4096, hidden_size=384, intermediate_size=1024, num_attention_heads=6)
    model = HuggingFaceModel(build(config, seed=0, spread=0.05), None, "model", backend)
    assert model._backend.any_threads
    cache, before = model.new_cache(), torch.get_num_threads()
    for rows in (1, 3, 5, 8, 17, 32):
        found = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            tokens = torch.arange(rows) * 37 % 4096
            segment = Segment(cache, tokens, chain_shape(rows), range(rows))
            found.append(model._backend.forward([segment], model.device).logits)
            cache.rollback(0)
        torch.set_num_threads(before)
        assert all(found[0].equal(each) for each in found[1:]), f"{rows} rows"


def test_while_torch_has_one_thread_forwards_have_all() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch_on_one_thread():
            assert (torch.get_num_threads(), forward_threads()) == (1, 3)
            with torch_on_one_thread():  # as a step within a measurement
                assert (torch.get_num_threads(), forward_threads()) == (1, 3)
            with torch_on_all_threads():
                assert torch.get_num_threads() == forward_threads() == 3
            assert (torch.get_num_threads(), forward_threads()) == (1, 3)
        assert torch.get_num_threads() == forward_threads() == 3
        with torch_on_all_threads():
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("backend", "torch_threads"), [(native_backend, 1), (StockBackend, 2)])
def test_within_a_step_torch_keeps_out_of_the_way_of_native_threads(backend: BackendMaker, torch_threads: int) -> None:
    made = build(llama(hidden_size=64, intermediate_size=64, num_attention_heads=2), seed=0, spread=0.05)
    if backend is native_backend and not NativeBackend.fits(llama_of(made, [Full()] * 2)):
        pytest.skip("decoder.c cannot be compiled here")
    engine = Engine(HuggingFaceModel(made, None, "model", backend))
    seen: list[tuple[int, int]] = []
    engine.listeners.append(lambda _: seen.append((torch.get_num_threads(), forward_threads())))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine.generate([1, 2], SamplingParams(max_tokens=3))
        assert seen == [(torch_threads, 2)] * 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
