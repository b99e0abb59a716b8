"""Make a small hybrid target and its draft: `python -m recipes.hybrid.build`, from the root.

Three layers in four are gated delta nets, as in Qwen 3.5, every fourth is attention. Text, split, tokenizer and
prompts are those of the embedded pair (`recipes/stdlib`), and the draft begins as the embedded one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from recipes.stdlib.settings import CONTEXT, VOCAB_SIZE, Settings
from recipes.stdlib.stages import Recipe
from truedraft.errors import TruedraftError
from truedraft.models.architecture import load_causal_lm, save_llama
from truedraft.training.drafts import DraftConfig, StreamObjective, distillation_loop, starting_draft
from truedraft.training.loop import CHECKPOINT_EVERY_S, RunFolder, StepRecord, TrainingLoop
from truedraft.training.losses import CrossEntropy
from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig, WarmupStableDecay
from truedraft.training.texts.data import Curriculum, stream_hash
from truedraft.training.texts.tokenizer import load_tokenizer, save_tokenizer

ROOT = Path(__file__).parents[2]
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
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    run: Path = options.run
    recipe = Recipe(run, Settings.load(), say=_say)
    try:
        recipe.data()
        target = run / "target"
        _finish(_target_loop(recipe, options.steps), target, run)
        teacher = load_causal_lm(target, dtype=torch.bfloat16).eval()
        config = DraftConfig(
            start_from=EMBEDDED / "draft",
            schedule=WarmupStableDecay(10, *options.draft_steps),
            optimizer=OptimizerConfig(2e-3, 2e-3),
            curriculum=CURRICULUM,
            seed=DRAFT_SEED,
        )
        draft = starting_draft(config, teacher, load_tokenizer(target))
        _finish(distillation_loop(config, teacher, draft, recipe.stream(), run / "draft" / "work"), run / "draft", run)
    except TruedraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _target_loop(recipe: Recipe, steps: tuple[int, int]) -> TrainingLoop:
    model, stream = new_target(), recipe.stream()
    schedule = WarmupStableDecay(10, *steps)
    sizes = {name: str(value) for name, value in sorted(model.config.to_dict().items())}
    identity = {"schedule": str(schedule), "data": stream_hash(stream), **sizes}
    return TrainingLoop(
        model,
        MixedOptimizer(model, OptimizerConfig()),
        StreamObjective(model, CrossEntropy()),
        CURRICULUM.phases(stream, schedule, seed=SEED),
        schedule,
        RunFolder(recipe.run / "target" / "work", identity, "cpu", CHECKPOINT_EVERY_S),
    )


def _finish(loop: TrainingLoop, out: Path, run: Path) -> None:
    if not (out / "config.json").exists():
        loop.run(on_step=lambda record: _report(out.name, record))
        save_llama(loop.model, out)
        save_tokenizer(load_tokenizer(run / "tokenizer"), out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "hybrid", help="streams, checkpoints, logs, models")
    parser.add_argument("--steps", type=int, nargs=2, default=(700, 200), help="of the target, before and in the decay")
    parser.add_argument("--draft-steps", type=int, nargs=2, default=(300, 100), help="likewise of the draft")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args(arguments)


def _report(name: str, record: StepRecord) -> None:
    if (record.step + 1) % 20 == 0:
        values = " ".join(f"{key} {value:.4f}" for key, value in record.values.items())
        _say(f"{name}: step {record.step + 1} {values} {record.elapsed_s:.0f} s")


def _say(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, flush=True)


if __name__ == "__main__":
    sys.exit(main())
