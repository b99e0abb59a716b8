"""`truedraft train medusa`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from truedraft.cli import head_options as heads_opt
from truedraft.cli import options as opt
from truedraft.cli import train_job as job_opt
from truedraft.cli.train_heads import naming_options, run
from truedraft.cli.train_job import WORK, Job, check_folder, clean_folder, time_budget
from truedraft.errors import OptionError

if TYPE_CHECKING:
    from truedraft.training.medusa import MedusaTrainingConfig

_HEADS_FILE = "heads.safetensors"
_STAGE_1 = "stage-1"  # the folder of the heads before stage 2, inside that of stage 2
_SECOND = "Stage 2"

_TYPED = heads_opt.TYPED | {
    "data_sha256": "the text that the target wrote",
    "joint.backbone.matrix_rate": "--backbone-rate",
    "joint.backbone.vector_rate": "--backbone-rate",
    "joint.lora_rank": "--lora-rank",
    "law_share": "--law-share",
    "heads": "--heads",
    "reads_token": "--reads-token",
}
_NAMED = heads_opt.NAMED | {
    "joint.steps": "--joint-steps",
    "joint.lora_rank": "--lora-rank",
    "heads": "--heads",
    "stage": "--stage",
    "law_share": "--law-share",
}

_Stage = Annotated[
    int, opt.option("--stage", "1: heads of a frozen target. 2: the target learns too.", heads_opt.WHAT, "1|2")
]
_Heads = Annotated[int, opt.option("--heads", "How many tokens after the next are guessed.", heads_opt.HEADS, "N")]
_Tied = Annotated[
    bool,
    opt.flag("--tied/--free", "Heads end in the target's LM head, or each in an output of its own.", heads_opt.HEADS),
]
_ReadsToken = Annotated[
    bool,
    opt.flag(
        "--reads-token/--vector-only",
        "Heads also read the token that was drawn from their vector, or the vector alone, as Medusa's own.",
        heads_opt.HEADS,
    ),
]
_StartFrom = Annotated[
    Path | None,
    opt.option("--start-from", "Heads to train further; in stage 2 they are warm already.", heads_opt.HEADS, "DIR"),
]
_LawShare = Annotated[
    float,
    opt.option(
        "--law-share", "1 learns the target's laws, 0 its tokens alone, in between a mixture.", heads_opt.RUN, "X"
    ),
]
_JointSteps = Annotated[int, opt.option("--joint-steps", "Updates of heads and target together.", _SECOND, "N")]
_BackboneRate = Annotated[float, opt.option("--backbone-rate", "The highest rate of the target.", _SECOND, "RATE")]
_LoraRank = Annotated[
    int | None,
    opt.option(
        "--lora-rank",
        "Rank of the target's adapters, which are merged when it is saved; 0 trains all weights.",
        _SECOND,
        "R",
        show_default="0 for small targets, else 32",
    ),
]


def medusa(
    *,
    model: heads_opt.Model = "embedded:target",
    data: heads_opt.Data = None,
    held_out: heads_opt.HeldOut = None,
    out: heads_opt.Out,
    resume: heads_opt.Resume = False,
    clean: job_opt.Clean = False,
    stage: _Stage = 1,
    tokens: heads_opt.Tokens = 400_000,
    prompt_tokens: heads_opt.PromptTokens = 64,
    answer_tokens: heads_opt.AnswerTokens = 192,
    temperature: heads_opt.Temperature = None,
    heads: _Heads = 4,
    layers: heads_opt.Layers = 1,
    tied: _Tied = True,
    reads_token: _ReadsToken = True,
    start_from: _StartFrom = None,
    epochs: heads_opt.Epochs = 2.5,
    steps: heads_opt.Steps = None,
    learning_rate: heads_opt.Rate = 0.01,
    law_share: _LawShare = 1.0,
    place_decay: heads_opt.PlaceDecay = 0.8,
    seed: heads_opt.Seed = 0,
    minutes: job_opt.Minutes = None,
    joint_steps: _JointSteps = 300,
    backbone_rate: _BackboneRate = 5e-4,
    lora_rank: _LoraRank = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    json: opt.Json = False,
) -> int:
    """Train heads that guess the tokens after the next, on what the target itself writes; measures what they bring."""
    from truedraft.cli.session import set_threads

    if clean:
        return clean_folder(out, json)
    budget = time_budget(minutes)
    check_folder(out, resume, out / WORK)
    _check_stage(out, resume, stage)
    plain = {
        "heads": heads, "layers": layers, "tied": tied, "reads_token": reads_token, "stage": stage, "tokens": tokens,
        "prompt_tokens": prompt_tokens, "law_share": law_share, "place_decay": place_decay, "epochs": epochs,
        "steps": steps, "start_from": start_from, "seed": seed,
    }  # fmt: skip
    set_threads(threads)
    common = heads_opt.Common(plain, answer_tokens, temperature, learning_rate, device)
    with naming_options(_NAMED):
        config = _config(common, backbone_rate, {"steps": joint_steps, "lora_rank": lora_rank})
    return _train(Job(model, list(data or ()), list(held_out or ()), out, resume, budget), config, json)


def _check_stage(out: Path, resume: bool, stage: int) -> None:
    """Refuse to go on in the folder of the other stage."""
    second = (out / _STAGE_1).is_dir()
    if resume and stage == 1 and second:
        raise OptionError(f"--out {str(out)!r} holds a training of stage 2; go on with --stage 2, or name a new folder")
    if resume and stage == 2 and not second and (out / _HEADS_FILE).is_file():
        raise OptionError(
            f"--out {str(out)!r} holds finished heads of stage 1, which stage 2 would overwrite; name a new folder, "
            f"and these heads with --start-from {out}"
        )


def _config(common: heads_opt.Common, backbone_rate: float, second: dict[str, Any]) -> MedusaTrainingConfig:
    from truedraft.training.head_config import JointConfig
    from truedraft.training.medusa import MedusaTrainingConfig
    from truedraft.training.optimizer import OptimizerConfig

    heads_opt.check_rate("--backbone-rate", backbone_rate)
    backbone = OptimizerConfig(backbone_rate, backbone_rate, matrix_weight_decay=0.0)
    return MedusaTrainingConfig(**common.fields(), joint=JointConfig(backbone=backbone, **second))


def _train(job: Job, config: MedusaTrainingConfig, json: bool) -> int:
    from truedraft.cli.medusa_report import print_result, record_of
    from truedraft.training.heads import train_heads

    return run(job, config, train_heads, print_result, record_of, _TYPED, json)
