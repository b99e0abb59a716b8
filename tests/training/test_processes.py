"""Two gloo processes learn what one does, also where Ctrl-C ends them and they go on.

Run as a program by `accelerate launch`, with TARGET and FOLDER, this file is one of the two.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import _muon

from training.conftest import TEXT
from truedraft.errors import OptionError, TrainingError
from truedraft.kinds.block.training import DSparkTrainingConfig
from truedraft.kinds.eagle.training import Eagle3TrainingConfig
from truedraft.kinds.medusa.training import MedusaTrainingConfig
from truedraft.kinds.redrafter.training import RedrafterTrainingConfig
from truedraft.training import evaluate
from truedraft.training.drafts import DraftConfig, train_draft
from truedraft.training.heads import train_heads
from truedraft.training.loop import TrainingLoop, checkpoint_of, read_checkpoint
from truedraft.training.ngrams import train_ngrams
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.processes import Processes, joined
from truedraft.training.texts.answer_writer import WritingConfig
from truedraft.training.texts.data import Curriculum
from truedraft.training.texts.prompts import PromptSets

pytest.importorskip("accelerate")
STEPS, INTERRUPTED_AT = 6, 3
WITHIN = 1e-5
"""Of weights, whose updates are up to 1e-2, and in proportion of what is logged: sums in float32 are taken in another
order, and six updates go on from them."""
HEADS: dict[str, Any] = {
    "tokens": 300, "writing": WritingConfig(answer_tokens=16, batch=8), "steps": STEPS, "learning_rate": 1e-2,
    "length": 2, "evaluate_every": 3,
}  # fmt: skip
LAYERS: dict[str, Any] = HEADS | {"layers": (0, 1), "draft_vocab": 64}
CONFIGS: dict[str, Any] = {  # steps of 5 sequences, 9 windows, 1 answer and 5 answers
    "draft": DraftConfig(
        width=16, layers=1, heads=2, kv_heads=1, intermediate=32, schedule=WarmupStableDecay(2, STEPS - 2, 2),
        curriculum=Curriculum(16, 16, 80, 80), on_policy=0.5,
    ),
    "redrafter": RedrafterTrainingConfig(**HEADS, state=24, layers=1, self_fed=0.3, positions_per_step=72),
    "eagle": Eagle3TrainingConfig(**LAYERS, positions_per_step=16),
    "dspark": DSparkTrainingConfig(**LAYERS, by_acceptance=True, anchors=8, markov=8, positions_per_step=75),
}  # fmt: skip


def train(kind: str, target: Path, data: Path, out: Path) -> Any:
    if kind == "draft":
        return train_draft(target, [data / "data.txt"], out / kind, CONFIGS[kind])
    stream = np.load(data / "data.npy")
    pieces = [stream[first : first + 12].tolist() for first in range(0, 900, 30)]
    prompts = PromptSets(pieces[:20], pieces[20:23], pieces[23:26], stream[900:1000])
    return train_heads(target, prompts, out / kind, CONFIGS[kind])


def compute_in_float32(patch: Callable[[object, str, Any], None]) -> None:
    """Muon's iteration is in bfloat16, and lifts what is next to nothing in a matrix: what stands for it lets no
    rounding grow. Answers are short, too."""
    step = TrainingLoop._step

    def exact(loop: TrainingLoop) -> Any:
        loop.autocast = False
        return step(loop)

    patch(TrainingLoop, "_step", exact)
    patch(_muon, "_zeropower_via_newtonschulz", lambda gradient, *_: gradient / (gradient.norm() + 1e-7))
    patch(evaluate, "_TOKENS", 4)


def train_interrupted(target: Path, out: Path) -> dict[str, Any]:
    """Each training, which Ctrl-C in the second process ends in both, and then again to its end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    processes, step, found = Processes.here(), TrainingLoop._step, {}

    def interrupting(loop: TrainingLoop) -> Any:
        if not processes.main and loop.progress.step == INTERRUPTED_AT - 1:
            signal.raise_signal(signal.SIGINT)
        return step(loop)

    for kind in CONFIGS:
        TrainingLoop._step = interrupting  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            train(kind, target, out, out)
        TrainingLoop._step = step  # type: ignore[method-assign]
        if processes.main:
            assert checkpoint_of(out / kind / "work")[0] == INTERRUPTED_AT  # type: ignore[index]
        found[kind] = train(kind, target, out, out).as_dict()
    return found


@pytest.fixture(scope="module")
def pair(learned_folder, stream, tmp_path_factory) -> Path:  # type: ignore[no-untyped-def]
    """Trained by two processes, which gave back the same."""
    out = tmp_path_factory.mktemp("pair")
    np.save(out / "data.npy", stream)
    (out / "data.txt").write_text(TEXT)
    words = ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0", __file__, learned_folder, out]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *words],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    assert said[0] == said[1] and said[0].keys() == CONFIGS.keys()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_two_processes_are_one(kind: str, pair: Path, learned_folder, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    compute_in_float32(monkeypatch.setattr)
    train(kind, learned_folder, pair, tmp_path)
    places = [each / kind / "work" for each in (tmp_path, pair)]
    logs = [list(map(json.loads, (each / "log.jsonl").read_text().splitlines())) for each in places]
    assert len(logs[0]) == len(logs[1]) == STEPS
    for one, two in zip(*logs, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {"elapsed_s", "alpha"}:
            digit = 1e-4 if name == "gradient_norm" else 1e-5  # the last that is logged
            assert two[name] == pytest.approx(one[name], rel=WITHIN, abs=1.1 * digit), name
    one, two = (read_checkpoint(each / "checkpoint.pt")["model"] for each in places)
    assert max(float((weight - two[name]).abs().max()) for name, weight in one.items()) < WITHIN


def test_parts_are_all_of_a_batch_in_turn() -> None:
    for count, processes in ((5, 2), (1, 3), (7, 7)):
        parts = [Processes(rank, processes).part(count) for rank in range(processes)]
        assert [each for part in parts for each in range(count)[part]] == list(range(count))


@pytest.mark.slow
def test_what_one_process_does_is_refused_to_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processes, "here", lambda: Processes(0, 2))
    with pytest.raises(OptionError, match="a table is counted in one process, and 2 were launched"):
        train_ngrams("embedded:target", [], tmp_path / "table")
    prompts, config = PromptSets([[1]], [[1]], [[1]], np.zeros(4, np.uint32)), MedusaTrainingConfig(stage=2)
    with pytest.raises(OptionError, match="stage 2 trains target and heads in one process"):
        train_heads("embedded:target", prompts, tmp_path / "heads", config)


def test_who_is_alone_against_all_expectation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch --num_processes 2` leaves the environment without a GPU; and where the others have died."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(OptionError, match="give it --multi_gpu"), joined("cpu"):
        pass

    def closed(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_gather_object", closed)
    with pytest.raises(TrainingError, match="another process of this training has ended"):
        Processes(1, 2, together=True).anywhere(False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined("cpu"):
        compute_in_float32(setattr)
        target, out = map(Path, sys.argv[1:])
        found = json.dumps(train_interrupted(target, out))
        (out / f"{Processes.here().rank}.json").write_text(found)
