"""Tiny models and data, so that training can be tested in seconds on one thread."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from recipes.common import pretraining_loop, train_tokenizer

from truedraft.models.architecture import LlamaShape, new_llama, save_llama
from truedraft.models.lm_head import LmHead
from truedraft.training import evaluate
from truedraft.training.drafts import DraftConfig
from truedraft.training.optimizer import OptimizerConfig, WarmupStableDecay
from truedraft.training.texts.data import Curriculum, save_tokenizer
from truedraft.training.texts.prompts import PromptSets
from truedraft.training.texts.self_distillation import CollatedBatch

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "".join(
    f"def add_{name}(left, right):\n    total = left + right\n    return total * {number}\n\n\n"
    for number, name in enumerate(["one", "two", "three", "four", "five", "six"] * 40)
)
SHAPE = LlamaShape(vocab_size=300, width=32, layers=2, heads=2, kv_heads=1, intermediate=64, context=128, head_size=16)
LEARNING = DraftConfig(optimizer=OptimizerConfig(1e-2, 1e-2), curriculum=Curriculum(32, 64, 256, 256))
CURRICULUM = Curriculum(stable_length=32, decay_length=64, tokens_per_step=256, tokens_per_pass=128)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Bitwise claims are made for a fixed number of threads, also of what the tests of a file share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer([TEXT], vocab_size=300, context=128)


@pytest.fixture(scope="session")
def stream(tokenizer):
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    return np.array([0, *ids, 0], dtype=np.uint32)


def pretrained(folder: Path, tokenizer: Any, stream: Any, config: DraftConfig, shape: LlamaShape = SHAPE) -> Path:
    """A target that has learned the text, with its tokenizer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    loop = pretraining_loop(shape, config, stream, folder / "work")
    loop.run()
    torch.set_num_threads(before)
    save_llama(loop.model, folder)
    save_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory, tokenizer, stream) -> Path:
    """A target that has learned the text a little."""
    config = DraftConfig(schedule=WarmupStableDecay(3, 40, 10), curriculum=CURRICULUM)
    return pretrained(tmp_path_factory.mktemp("target"), tokenizer, stream, config)


@pytest.fixture(scope="session")
def learned_folder(tmp_path_factory, tokenizer, stream) -> Path:
    """A target that has learned the text well, so that its answers can be guessed."""
    config = replace(LEARNING, schedule=WarmupStableDecay(3, 40, 10))
    return pretrained(tmp_path_factory.mktemp("learned"), tokenizer, stream, config)


@pytest.fixture(scope="session")
def prompts(stream) -> PromptSets:
    """20 to train on, 6 for trees, and 4 to measure on."""
    pieces = [stream[first : first + 12].tolist() for first in range(0, 900, 30)]
    return PromptSets(pieces[:20], pieces[20:26], pieces[26:], stream[900:1000])


@pytest.fixture(scope="module")
def short_answers():
    """What is measured at the end takes most of the time of trainings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "_TOKENS", 20)
        yield


@pytest.fixture(scope="module")
def lm_head():
    """Of a model with a vocabulary of 50 and vectors of 16 entries."""
    shape = LlamaShape(50, width=16, layers=1, heads=2, kv_heads=1, intermediate=32, context=64, head_size=8)
    model = new_llama(shape, seed=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)  # distributions far from uniform
    return LmHead.of(model)


@pytest.fixture
def packed():
    """Made-up places of a text for that head."""
    noise = torch.Generator().manual_seed(2)
    places = torch.cat([torch.arange(0, 9), torch.arange(12, 30)])  # two windows
    return CollatedBatch(
        torch.randn(33, 16, generator=noise), torch.randint(0, 50, (33,), generator=noise), places, np.arange(33)
    )
