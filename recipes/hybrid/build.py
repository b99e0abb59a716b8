"""Make a small hybrid target and its draft: `python -m recipes.hybrid.build`, from the root.

Three layers in four are gated delta nets, as in Qwen 3.5, every fourth is attention. Text, split, tokenizer and
prompts are those of the embedded pair (`recipes/stdlib`), and the draft begins as the embedded one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from recipes.common import ROOT, command, run_loop, say
from recipes.stdlib.settings import CONTEXT, VOCAB_SIZE, Settings
from recipes.stdlib.stages import Recipe
from truedraft.models.architecture import load_causal_lm, save_llama
from truedraft.training.drafts import DraftConfig, starting_draft, stream_loop
from truedraft.training.loop import TrainingLoop
from truedraft.training.losses import CrossEntropy
from truedraft.training.optimizer import WarmupStableDecay
from truedraft.training.texts.data import Curriculum
from truedraft.training.texts.tokenizer import load_tokenizer, save_tokenizer

EMBEDDED = ROOT / "src" / "truedraft" / "embedded" / "stdlib"
CURRICULUM = Curriculum(stable_length=512, decay_length=1024, tokens_per_step=4096, tokens_per_pass=2048)
SEED, DRAFT_SEED = 7, 8


def new_target() -> PreTrainedModel:
    """8.9 M parameters in float32; the same weights each time."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Qwen3_5ForCausalLM(config)


def main(arguments: list[str] | None = None) -> int:
    """Train target and draft; an interrupted run goes on from its last checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "hybrid", help="streams, checkpoints, logs, models")
    parser.add_argument("--steps", type=int, nargs=2, default=(700, 200), help="of the target, before and in the decay")
    parser.add_argument("--draft-steps", type=int, nargs=2, default=(300, 100), help="likewise of the draft")
    return command(parser, _build, arguments)


def _build(options: argparse.Namespace) -> None:
    run: Path = options.run
    recipe = Recipe(run, Settings.load(), say=say)
    recipe.data()
    stream, target = recipe.stream(), run / "target"
    schedule = WarmupStableDecay(10, *options.steps)
    config = DraftConfig(loss=CrossEntropy(), schedule=schedule, curriculum=CURRICULUM, seed=SEED)
    _finish(stream_loop(config, None, new_target(), stream, target / "work"), target, run)
    teacher = load_causal_lm(target, dtype=torch.bfloat16).eval()
    schedule = WarmupStableDecay(10, *options.draft_steps)
    config = DraftConfig(start_from=EMBEDDED / "draft", schedule=schedule, curriculum=CURRICULUM, seed=DRAFT_SEED)
    draft = starting_draft(config, teacher, load_tokenizer(target))
    _finish(stream_loop(config, teacher, draft, stream, run / "draft" / "work"), run / "draft", run)


def _finish(loop: TrainingLoop, out: Path, run: Path) -> None:
    if not (out / "config.json").exists():
        run_loop(loop, out.name)
        save_llama(loop.model, out)
        save_tokenizer(load_tokenizer(run / "tokenizer"), out)


if __name__ == "__main__":
    sys.exit(main())
