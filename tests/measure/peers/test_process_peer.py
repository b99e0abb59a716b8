"""A user's own function as an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from truedraft import SamplingParams
from truedraft.errors import OptionError, PeerError
from truedraft.measure.peers import ProcessPeer, Question, Reply, load_function

MODULE = """
def tokens(prompt, max_tokens, seed=None):
    return [*prompt, seed or 0][-max_tokens:]

class Engine:
    def answer(self, prompt):
        return prompt

engine = Engine()
number = 3
"""


def ask(peer: ProcessPeer, **params: Any) -> Reply | PeerError:
    (found,) = peer.ask([Question((4, 5), SamplingParams(**params))])
    return found


def test_it_is_given_what_its_signature_names() -> None:
    given: dict[str, Any] = {}

    def sample(
        prompt: list[int], *, temperature: float, seed: int | None, stop: list[str], other: int = 3
    ) -> list[int]:
        given.update(prompt=prompt, temperature=temperature, seed=seed, stop=stop)
        return [1, 2, 3]

    peer = ProcessPeer(sample)
    assert peer.facts.takes == ("max_tokens", "temperature", "seed", "stop")
    assert peer.facts.filters == ("temperature",) and peer.facts.gives_ids and peer.facts.name.endswith("sample")
    assert ask(peer, temperature=0.5, stop="x", max_tokens=2) == Reply((1, 2))
    assert given == {"prompt": [4, 5], "temperature": 0.5, "seed": None, "stop": ["x"]}
    assert "has no argument top_p" in str(ask(peer, top_p=0.5))


def test_a_function_of_any_arguments_is_given_all() -> None:
    def sample(prompt: list[int], **options: Any) -> list[int]:
        assert set(options) == {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"}
        return [options["top_k"]] * 3

    peer = ProcessPeer(sample, name="mine")
    assert peer.facts.name == "mine" and peer.facts.filters == ("temperature", "top_k", "top_p", "min_p")
    # It was told how many tokens to answer, so that more of them are its own doing, and are seen.
    assert ask(peer, top_k=9, max_tokens=2) == Reply((9, 9, 9))


def test_functions_without_a_signature_get_the_prompt() -> None:
    assert ask(ProcessPeer(sorted)) == Reply((4, 5), finish_reason="stop")
    assert ProcessPeer(max).facts.takes == ("max_tokens",)


@pytest.mark.parametrize("made", [(7, 0), [7, 0], np.array([7, 0]), torch.tensor([7, 0]), [np.int64(7), 0]])
def test_ids_of_any_kind_and_their_end(made: Any) -> None:
    peer = ProcessPeer(lambda prompt: made, vocab_size=8, eos_token_ids=(0,))
    assert ask(peer) == Reply((7,), finish_reason="stop")
    assert ask(peer, max_tokens=1) == Reply((7,), finish_reason="length")


def test_what_is_no_answer() -> None:
    for made, message in (
        ("text", "must return a list of token ids, got 'text'"),
        (None, "must return a list of token ids, got None"),
        ([[1, 2]], "must return a list of token ids, which are whole numbers, got [1, 2] in it"),
        ([1.5], "must return a list of token ids, which are whole numbers, got 1.5 in it"),
        ([True], "got True in it"),
        (torch.tensor([7.0, 0.0]), "got 7.0 in it"),
        (torch.tensor([True]), "got True in it"),
        ([torch.tensor(7.0)], "got tensor(7.) in it"),
        ([torch.tensor(True)], "got tensor(True) in it"),
        ([torch.tensor([1, 2])], "got tensor([1, 2]) in it"),
        ([np.bool_(True)], "got np.True_ in it"),
        ([np.array([1, 2])], "got array([1, 2]) in it"),
        (np.array([7, "x"], dtype=object), "got 'x' in it"),
        (np.array([7, None], dtype=object), "got None in it"),
        (np.array([7.5]), "got 7.5 in it"),
        (torch.tensor(3), "must return a list of token ids"),
        ([8], "token id 8, outside a vocabulary of 8"),
    ):
        assert message in str(ask(ProcessPeer(lambda prompt, made=made: made, vocab_size=8)))


def test_what_stands_behind_an_end_of_text_is_part_of_the_answer() -> None:
    """Padding, too: an engine that went on behind its end would look the same."""
    peer = ProcessPeer(lambda prompt: [7, 0, 0], eos_token_ids=(0,))
    assert ask(peer) == Reply((7, 0), finish_reason="stop")
    assert ask(ProcessPeer(lambda prompt: [10**6])) == Reply((10**6,), finish_reason="stop")  # no size, no refusal


def test_an_exception_is_the_error_of_its_question() -> None:
    def sample(prompt: list[int]) -> list[int]:
        if prompt == [1]:
            raise ZeroDivisionError("by me")
        return prompt

    peer = ProcessPeer(sample, name="mine")
    found = peer.ask([Question((token,), SamplingParams()) for token in (0, 1, 2)])
    assert found[0] == Reply((0,), finish_reason="stop") and found[2] == Reply((2,), finish_reason="stop")
    assert isinstance(found[1], PeerError) and str(found[1]) == "mine raised ZeroDivisionError: by me"


def test_a_function_that_ends_the_program_does_not() -> None:
    assert "raised SystemExit: 0" in str(ask(ProcessPeer(lambda prompt: sys.exit(0), vocab_size=8)))


def test_functions_are_loaded_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_process_module.py").write_text(MODULE)
    (tmp_path / "own_broken_module.py").write_text("1 / 0")
    (tmp_path / "own_leaving_module.py").write_text("raise SystemExit(0)")
    (tmp_path / "own_needing_module.py").write_text("import module_that_is_nowhere")
    monkeypatch.chdir(tmp_path)
    peer = ProcessPeer(load_function("process", "own_process_module:tokens"))
    assert ask(peer, max_tokens=2, seed=9) == Reply((5, 9))
    assert load_function("process", "own_process_module:engine.answer")([3]) == [3]
    for words, message in (
        ("own_process_module", "process must be module:function, got 'own_process_module'"),
        ("own process:f", "must be module:function"),
        ("no_such_module:f", "process names no module that there is, 'no_such_module'"),
        ("own_process_module:other", "process 'own_process_module:other': module 'own_process_module' has no other"),
        ("own_process_module:number", "is a int, which cannot be called"),
        ("own_broken_module:f", r"cannot be imported \(ZeroDivisionError: division by zero\)"),
        ("own_leaving_module:f", r"cannot be imported \(SystemExit: 0\)"),
        ("own_needing_module:f", "No module named 'module_that_is_nowhere'"),
    ):
        with pytest.raises(OptionError, match=message):
            load_function("process", words)
