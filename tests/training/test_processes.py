"""Two gloo processes learn what one does, also where Ctrl-C ends them and they go on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import process_pair
from support.process_pair import CONFIGS, INTERRUPTED_AT, STEPS, in_float32, train
from training.conftest import TEXT
from truedraft.errors import OptionError, TrainingError
from truedraft.training.heads import train_heads
from truedraft.training.loop import read_checkpoint
from truedraft.training.medusa import MedusaTrainingConfig
from truedraft.training.ngrams import train_ngrams
from truedraft.training.processes import Processes, joined
from truedraft.training.texts.prompts import PromptSets

pytest.importorskip("accelerate")
WITHIN = 1e-5
"""Of weights, whose updates are up to 1e-2, and in proportion of what is logged: sums in float32 are taken in another
order, and six updates go on from them."""


@pytest.fixture(scope="module")
def pair(learned_folder, stream, tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:  # type: ignore[no-untyped-def]
    """Trained by two processes; and what each of them gave back."""
    out = tmp_path_factory.mktemp("pair")
    np.save(out / "data.npy", stream)
    (out / "data.txt").write_text(TEXT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, process_pair.__file__, learned_folder, out / "data.npy", out]
    both = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        paths = {"PYTHONPATH": os.pathsep.join(map(str, sys.path)), "OMP_NUM_THREADS": 1}
        environment = os.environ | {name: str(value) for name, value in (place | paths).items()}
        both.append(subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        said = [each.communicate(timeout=300)[1] for each in both]
    finally:
        for each in both:
            each.kill()
    assert [each.returncode for each in both] == [0, 0], said
    return out, [json.loads((out / f"said-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_two_processes_are_one(kind: str, pair, learned_folder, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Steps of 5 sequences, 9 windows, 1 answer and 4 answers."""
    out, said = pair
    with in_float32(monkeypatch.setattr):
        result = train(kind, learned_folder, out / "data.npy", tmp_path)
    logs = [
        [json.loads(line) for line in (each / kind / "work" / "log.jsonl").read_text().splitlines()]
        for each in (tmp_path, out)
    ]
    assert len(logs[0]) == len(logs[1]) == STEPS and result.as_dict().keys() == said[1][kind].keys()
    for one, two in zip(*logs, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {"elapsed_s", "alpha"}:
            digit = 1e-4 if name == "gradient_norm" else 1e-5  # the last that is logged
            assert two[name] == pytest.approx(one[name], rel=WITHIN, abs=1.1 * digit), name
    one, two = (read_checkpoint(each / kind / "work" / "checkpoint.pt")["model"] for each in (tmp_path, out))
    assert max(float((weight - two[name]).abs().max()) for name, weight in one.items()) < WITHIN
    assert said[0][f"{kind} interrupted"] and said[1][f"{kind} interrupted"]
    assert said[0][f"{kind} at"] == INTERRUPTED_AT and said[0][kind] == said[1][kind]


def test_parts_are_all_of_a_batch_in_turn() -> None:
    for count, processes in ((5, 2), (1, 3), (7, 7)):
        parts = [Processes(rank, processes).part(count) for rank in range(processes)]
        assert [each for part in parts for each in range(count)[part]] == list(range(count))
    assert Processes().part(5) is None


def test_what_one_process_does_is_refused_to_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "here", lambda: Processes(0, 2))
    with pytest.raises(OptionError, match="a table is counted in one process, and 2 were launched"):
        train_ngrams("embedded:target", [], tmp_path / "table")
    prompts = PromptSets([[1]], [[1]], [[1]], np.zeros(4, np.uint32))
    with pytest.raises(OptionError, match="stage 2 trains target and heads in one process"):
        config = MedusaTrainingConfig(stage=2, start_from=tmp_path)
        train_heads("embedded:target", prompts, tmp_path / "heads", config)


def test_who_asked_for_several_processes_and_got_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch --num_processes 2` leaves the environment where there is no GPU."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(OptionError, match="give it --multi_gpu"), joined("cpu"):
        pass


def test_a_process_that_is_left_alone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_gather_object", closed)
    with pytest.raises(TrainingError, match="another process of this training has ended"):
        Processes(1, 2, together=True).anywhere(False)
