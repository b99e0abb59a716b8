"""Training of language models on streams of text, towards a target's distributions or the text itself."""

from __future__ import annotations

import copy
import tempfile
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from truedraft.core.params import SamplingParams
from truedraft.drafters.draft_model import DraftModel
from truedraft.drafters.registry import read_draft_ids, write_draft_ids, write_record
from truedraft.engine import Engine
from truedraft.errors import (
    DataError,
    ModelError,
    OptionError,
    TrainingError,
    UnsupportedModelError,
    VocabularyMismatchError,
)
from truedraft.machine import describe_machine, in_bytes
from truedraft.measure import TREE_TEMPERATURES
from truedraft.models.architecture import LlamaShape, load_causal_lm, new_llama, save_llama, use_training_attention
from truedraft.models.cache.request import LEAST_CONTEXT
from truedraft.models.checkpoint import fingerprint_of, sample_of, weights_hash
from truedraft.models.huggingface import HuggingFaceModel
from truedraft.models.loading import load_model, resolve_source
from truedraft.options import check_share
from truedraft.training.evaluate import (
    EngineEvaluation,
    EngineRound,
    PairReport,
    context_of,
    evaluate_pair,
    measure_in_engine,
)
from truedraft.training.loop import (
    CHECKPOINT,
    CHECKPOINT_EVERY_S,
    LENGTHS,
    WARMUP,
    Callbacks,
    Identity,
    Progress,
    RunFolder,
    StepRecord,
    TrainingLoop,
    checkpoint_of,
    identity_of,
    train_with_callbacks,
)
from truedraft.training.losses import DistillationLoss, ForwardKL, Mixture, TotalVariation, distillation_gradient
from truedraft.training.optimizer import MixedOptimizer, OptimizerConfig, WarmupStableDecay
from truedraft.training.options import DraftSizeOptions
from truedraft.training.processes import Processes
from truedraft.training.report import base_name, evaluation_facts, pair_facts, training_facts, write_card
from truedraft.training.texts.answer_writer import Source, Writing, WritingConfig, names_of
from truedraft.training.texts.data import (
    Curriculum,
    copy_tokenizer,
    ids_by_frequency,
    load_tokenizer,
    read_stream,
    stream_hash,
    write_stream,
)
from truedraft.training.workspace import WORK, WRITTEN, TimeBudget, duration, exclusive_access, free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from truedraft.models.base import LanguageModel
    from truedraft.training.texts.self_distillation import WrittenAnswer

_HELD_OUT_FRACTION = 0.05
_EVALUATED_TOKENS = 65_536
_TRAINED = 0.85  # share of a budget for everything until training ends; the rest is for measuring
_STREAM = "train.bin"  # in the working folder
_BYTES = 12  # of a written token on disk, in JSON and in the stream
_GOOD_PASSES, _MOST_PASSES = 4, 40  # passes over a text
_PROMPTS, _PROMPT_TOKENS = 32, 64  # of held-out text, for measuring in the engine


class OwnText:
    """Lets a student write the second half of a share of the sequences, at temperature 1, without a gradient.

    The samples are a function of the seed, the sequence and the weights, so resumed and distributed trainings agree.
    `student` is in training, and shares its weights; `share` is the probability of each sequence.
    """

    def __init__(self, student: PreTrainedModel, share: float, seed: int) -> None:
        shared = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in student.parameters()}
        self._writer = HuggingFaceModel(copy.deepcopy(student, shared), None, "the student")
        self._share, self._seed = share, seed

    @torch.no_grad()
    def __call__(self, batch: Tensor) -> Tensor:
        """The sequences `[sequences, length + 1]`; the last token stays. TrainingError if the student fails."""
        length = batch.shape[1] - 1
        kept = (length + 1) // 2
        keys = {place: zlib.crc32(str(row).encode()) for place, row in enumerate(batch.tolist())}
        drawn = {place: np.random.default_rng((self._seed, key)).random() for place, key in keys.items()}
        chosen = [place for place, draw in drawn.items() if draw < self._share]
        if not chosen or kept == length:
            return batch
        engine, batch = Engine(self._writer, controller="fixed", max_batch=len(chosen)), batch.clone()
        params = [
            SamplingParams(max_tokens=length - kept, temperature=1.0, seed=keys[place], ignore_eos=True)
            for place in chosen
        ]
        with torch.autocast(batch.device.type, enabled=False):
            answers = engine.generate(batch[chosen, :kept].tolist(), params)
        if failed := [each.error for each in answers if each.error is not None]:
            raise TrainingError(f"the draft could not write text to learn from: {failed[0]}")
        batch[chosen, kept:length] = torch.tensor([each.token_ids for each in answers], device=batch.device)
        return batch


@dataclass
class StreamObjective:
    """Trains a model towards a target's distributions along a text; without a target, towards the text itself."""

    model: PreTrainedModel
    loss: DistillationLoss
    target: PreTrainedModel | None = None
    own_text: OwnText | None = None

    def accumulate(self, batch: torch.Tensor, scale: float, own: slice | None = None) -> dict[str, float]:
        """Add `scale` times the gradient of the mean loss over the batch `[sequences, length + 1]`.

        Returns the mean loss and, with a target, `alpha` of the first chunk of each process's part.
        """
        whole, batch = len(batch), batch if own is None else batch[own]
        share = len(batch) / whole
        if self.own_text is not None:
            batch = self.own_text(batch)
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        target = None
        if self.target is not None:
            with torch.no_grad():
                target = self.target(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        logits = self.model(input_ids=inputs, use_cache=False).logits.flatten(0, 1)  # [tokens, vocab]
        gradient, values = distillation_gradient(logits, target, labels, self.loss, scale * share)
        logits.backward(gradient)
        return {name: value * share for name, value in values.items()}


@dataclass(frozen=True)
class DraftConfig(DraftSizeOptions):
    """What decides the draft in addition to the target and the data.

    The default loss is half forward KL, which learns all of the target's distribution, and half total variation, which
    decides the acceptance rate. `tokens` and `writing` are for prompts that the target answers.
    """

    loss: DistillationLoss = field(default_factory=lambda: Mixture(((0.5, ForwardKL()), (0.5, TotalVariation()))))
    schedule: WarmupStableDecay = field(default_factory=lambda: WarmupStableDecay(20, 800, 200))
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(2e-3, 2e-3))
    curriculum: Curriculum = field(default_factory=Curriculum)
    tokens: int = 400_000
    writing: WritingConfig = field(default_factory=WritingConfig)
    on_policy: float = 0.0
    seed: int = 0
    device: str = "cpu"
    checkpoint_every_s: float = CHECKPOINT_EVERY_S

    def __post_init__(self) -> None:
        check_share("on_policy", self.on_policy)
        if self.on_policy and not self.loss.reads_target:
            raise OptionError("needs a loss that compares distributions, not one of the text", field="on_policy")
        if self.heads % self.kv_heads:
            raise OptionError(f"the heads ({self.heads}) must be a multiple of the kv heads ({self.kv_heads})")
        if self.width % (2 * self.heads):
            raise OptionError(
                f"the width ({self.width}) must be a multiple of twice the heads ({2 * self.heads}), "
                "so that every head has an even size"
            )


@dataclass(frozen=True)
class DraftResult:
    """A trained draft, its report on held-out text, and the effort it took."""

    folder: Path
    report: PairReport
    steps: int
    tokens: int
    elapsed_s: float
    evaluations: Sequence[EngineEvaluation] = ()  # empty where the engine cannot run the target

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_s,
            "tokens_per_s": self.tokens / self.elapsed_s if self.elapsed_s else 0.0,
            "held_out": asdict(self.report),
            "served": [
                each.as_dict() | {"draft_acceptance_rate": each.stats.draft_acceptance_rate}
                for each in self.evaluations
            ],
        }


@dataclass(frozen=True)
class _Job:
    target: str | Path
    source: Source
    out: Path
    hooks: Callbacks
    budget: TimeBudget

    @property
    def work(self) -> Path:
        return self.out / WORK


def train_draft(
    target: str | Path,
    data: Sequence[Path],
    out: Path,
    config: DraftConfig | None = None,
    *,
    held_out: Sequence[Path] = (),
    callbacks: Callbacks | None = None,
    budget: TimeBudget | None = None,
) -> DraftResult:
    """Distil a draft for the target into the model folder `out`, or resume an interrupted training there.

    Of several processes (`Processes`) all return the main one's result.

    Args:
        target: an embedded name, a folder, or a name on the Hugging Face hub.
        data: files for `read_data`, of which the target answers the prompts; with `SELF` it also writes its own.
        held_out: files to measure alpha on; without them the last twentieth of the data is held out.
        budget: the time for everything, measuring included; None sets no limit.

    Raises:
        ModelError: the target cannot be loaded or has no tokenizer.
        DataError: the data cannot be read, or is too short.
        OptionError: `out` holds a training with another configuration, or another process is training there.
        TrainingError: the loss is not finite.
    """
    config, budget, hooks = config or DraftConfig(), budget or TimeBudget(), callbacks or Callbacks()

    def remark(record: StepRecord) -> str:
        return ", ".join(f"{name} {value:.3f}" for name, value in record.values.items())

    tokenizer = load_tokenizer(resolve_source(str(target)))
    if not data:
        raise DataError("no training data was given: name at least one text file")
    processes = Processes.here()
    if not processes.main:
        return _train_beside(target, out / WORK, tokenizer, config.device)
    job = _Job(target, Source.read(data, held_out, tokenizer), out, hooks, budget)
    with exclusive_access(job.work):
        target_model = load_causal_lm(target, dtype="auto", device=config.device).eval()
        draft = starting_draft(config, target_model, tokenizer)
        config = _fitting(config, target_model, draft, hooks.on_note)
        config = _planned(job, config, target_model, draft)
        train, test = _streams(job.source, _answers(job, config), tokenizer, job.work)
        _check_amount(config, train, hooks.on_note)
        loop = stream_loop(config, target_model, draft, train, job.work)
        processes.from_main((config, len(train)))
        progress = train_with_callbacks(loop, hooks, remark, lambda: budget.over(_TRAINED))
        save_llama(draft, out)
        copy_tokenizer(target, out)
        fewer = config.draft_vocab if config.draft_vocab < draft.config.vocab_size else 0
        write_draft_ids(out, ids_by_frequency(train, fewer)[:fewer])  # none: an earlier run's are removed
        result = _measured(job, config, target_model, test, progress)
        try:
            length = config.curriculum.decay_length
            record_draft(out, str(target), target_model, result.report, result.evaluations, context=length)
        except ModelError as error:
            hooks.on_note(f"the draft does not say which target it is for: {error}")
        _write_card(out, str(target), names_of(data), draft.num_parameters(), result, config.device)
        return processes.from_main(result)


def _answers(job: _Job, config: DraftConfig) -> list[WrittenAnswer]:
    if not job.source.has_prompts:
        return []
    begun = (job.work / CHECKPOINT).is_file()
    writing = Writing(config.tokens, config.writing, job.work, job.hooks, job.budget, begun)
    model = load_model(job.target, device=config.device)
    job.budget.loaded()
    return writing.answers(model, job.source.prompts, job.source.asks)


def _write_card(out: Path, target: str, data: str, parameters: int, result: DraftResult, device: str) -> None:
    facts = training_facts(
        parameters=parameters,
        data=data,
        steps=result.steps,
        tokens=result.tokens,
        elapsed_s=result.elapsed_s,
        machine=describe_machine(device),
    )
    sentence = f"Proposes tokens that {base_name(target)} verifies (speculative decoding). Distilled with truedraft."
    measured = pair_facts(result.report) | evaluation_facts(result.evaluations)
    write_card(out, target, "A draft", sentence, facts, measured, "draft-model", library="transformers")


def _train_beside(target: str | Path, work: Path, tokenizer: PreTrainedTokenizerBase, device: str) -> DraftResult:
    processes = Processes.here()
    given: tuple[DraftConfig, int] = processes.from_main(None)
    config, tokens = replace(given[0], device=device), given[1]
    target_model = load_causal_lm(target, dtype="auto", device=device).eval()
    draft = starting_draft(config, target_model, tokenizer)
    stream_loop(config, target_model, draft, read_stream(work / _STREAM)[:tokens], work).run()
    return processes.from_main(None)


def _planned(job: _Job, config: DraftConfig, target_model: PreTrainedModel, draft: PreTrainedModel) -> DraftConfig:
    budget, before = job.budget, checkpoint_of(job.work)
    if before is not None:
        numbers = [int(before[1].get(name) or 0) for name in (WARMUP, *LENGTHS)]
        return replace(config, schedule=WarmupStableDecay(*numbers)) if budget.limited and any(numbers) else config
    made_up = np.random.default_rng(config.seed).integers(
        draft.config.vocab_size, size=4 * max(config.curriculum.tokens_per_step, 512), dtype=np.uint32
    )
    with tempfile.TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
        step_s, size = stream_loop(config, target_model, copy.deepcopy(draft), made_up, Path(place)).trial()
    requested, writes = config.schedule.total_steps, job.source.has_prompts
    steps = budget.steps(requested, step_s, begin=WRITTEN if writes else 0.0, until=_TRAINED)
    budget.buys(steps, requested, f"{steps:,} steps of training, {step_s:.2g} s each", job.hooks.on_note)
    within = f", all within {budget.minutes:g} minutes" if budget.limited else ""
    first = f"the target writes up to {config.tokens:,} tokens, {in_bytes(_BYTES * config.tokens)}; " if writes else ""
    job.hooks.on_plan(
        f"{first}{steps:,} steps of training take about {duration(steps * step_s)} ({step_s:.2g} s each), and "
        f"checkpoints up to {in_bytes(2 * size)} of the disk of {str(job.work)!r}, of which "
        f"{in_bytes(free_bytes(job.work))} are free{within}"
    )
    return replace(config, schedule=config.schedule.shortened(steps))


def _check_amount(config: DraftConfig, stream: NDArray[np.uint32], on_note: Callable[[str], None]) -> None:
    """Report a text that is read several times, and refuse one that is read too often to teach more.

    Text repeated up to four times is nearly as good as new; from forty times on it adds nothing (2305.16264).
    """
    config.curriculum.phases(stream, config.schedule, seed=config.seed)  # raises if it is too short
    total = config.schedule.total_steps * config.curriculum.tokens_per_step
    times = total / len(stream)
    got = f"the text has {len(stream):,} tokens, and the training reads {total:,}, each of them {times:.0f} times"
    if times > _MOST_PASSES:
        raise DataError(f"{got}; beyond {_MOST_PASSES} times it learns nothing more: give more text, or fewer steps")
    if times > _GOOD_PASSES:
        on_note(f"{got}; beyond {_GOOD_PASSES} times new text teaches more than old")


def _measured(
    job: _Job, config: DraftConfig, target_model: PreTrainedModel, held_out: NDArray[np.uint32], progress: Progress
) -> DraftResult:
    most, budget, out = _EVALUATED_TOKENS, job.budget, job.out
    if budget.limited and progress.elapsed_s:  # a step runs both models too, and one backward
        most = min(most, max(1, int(0.5 * budget.left_s() * progress.tokens / progress.elapsed_s)))
    saved = load_causal_lm(out, dtype="auto", device=config.device).eval()
    report = evaluate_pair(target_model, saved, held_out, length=config.curriculum.decay_length, max_tokens=most)
    evaluations: Sequence[EngineEvaluation] = ()
    count = min(_PROMPTS, max(1, len(held_out) // _PROMPT_TOKENS))
    starts = [number * len(held_out) // count for number in range(count)]
    prompts = [held_out[start : start + _PROMPT_TOKENS].tolist() for start in starts]
    try:
        served, drafting = (load_model(each, device=config.device) for each in (job.target, out))
        ids = read_draft_ids(out, drafting.vocab_size)
        guessed = None if ids is None else torch.tensor(ids)
        evaluations = chain_evaluations(served, drafting, prompts, budget, guessed)
    except UnsupportedModelError as error:
        job.hooks.on_note(f"the draft was not measured in the engine: {error}")
    return DraftResult(out, report, progress.step, progress.tokens, progress.elapsed_s, evaluations)


def chain_evaluations(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Sequence[Sequence[int]],
    budget: TimeBudget | None = None,
    ids: Tensor | None = None,
) -> list[EngineEvaluation]:
    """Measure the default chain in the engine; arguments as in `measure_in_engine` and `DraftModel`."""
    drafter = DraftModel(draft, ids=ids)
    about = {"num_speculative_tokens": drafter.limits.depth}
    rounds = [EngineRound(temperature, lambda: drafter, about) for temperature in TREE_TEMPERATURES.values()]
    return measure_in_engine(target, rounds, prompts, budget=budget)


def record_draft(
    folder: Path,
    target: str,
    target_model: PreTrainedModel,
    report: PairReport,
    evaluations: Sequence[EngineEvaluation],
    context: int | None = None,
) -> None:
    """Write the draft's target and measured quality into its folder.

    `context` is the tokens of its longest sequences in training; of longer texts `auto` shows it as many. Raises
    ModelError if the target has no fingerprint, or the file cannot be written.
    """
    figures: dict[str, Any] = {"alpha": report.alpha, "greedy_agreement": report.greedy_agreement}
    if context is not None:
        figures["context"] = max(context, LEAST_CONTEXT)
    figures["served"] = [each.as_dict() for each in evaluations]
    write_record(folder, "draft", target, fingerprint_of(target_model), figures, sample_of(target_model))


def stream_loop(
    config: DraftConfig,
    target: PreTrainedModel | None,
    draft: PreTrainedModel,
    stream: NDArray[np.uint32],
    folder: Path,
) -> TrainingLoop:
    """The loop that trains the draft along the stream; `target` may be None where the loss needs only the text.

    The folder may hold the checkpoint of another run's stable phase, not longer than this one's, to branch from. Raises
    DataError for less than a sequence, OptionError for a folder with another training.
    """
    more = {"data_sha256": stream_hash(stream)}
    if target is not None:
        more["target"] = weights_hash(target.requires_grad_(False), torch.bfloat16)  # in any loaded dtype
    if target is None or config.start_from is not None:
        more["start_from"] = weights_hash(draft)
    own_text = OwnText(draft, config.on_policy, config.seed) if config.on_policy else None
    use_training_attention(draft)
    phases = config.curriculum.phases(stream, config.schedule, seed=config.seed)
    return TrainingLoop(
        draft,
        MixedOptimizer(draft, config.optimizer),
        StreamObjective(draft, config.loss, target, own_text),
        phases,
        config.schedule,
        RunFolder(folder, _identity(config, **more), config.device, config.checkpoint_every_s),
    )


def _identity(config: DraftConfig, **more: str) -> Identity:
    """What decides a draft; the hash of its text covers how that was written.

    A training without the draft's own text resumes from checkpoints of older versions, which have no such field.
    """
    return {
        name: value
        for name, value in identity_of(config, **more).items()
        if name.partition(".")[0] not in ("tokens", "writing", "draft_vocab", "" if config.on_policy else "on_policy")
    }


def _fitting(
    config: DraftConfig, target: PreTrainedModel, draft: PreTrainedModel, on_note: Callable[[str], None]
) -> DraftConfig:
    context = min(context_of(target), context_of(draft))
    fitted = config.curriculum.fitting(context)
    if fitted != config.curriculum:
        on_note(
            f"the context is {context:,} tokens, so training uses sequences of {fitted.stable_length:,}, "
            f"and of {fitted.decay_length:,} while the rate decays"
        )
    return replace(config, curriculum=fitted)


def starting_draft(config: DraftConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A new draft of the configured sizes, or the one to start from, if it fits the target."""
    vocab_size = target.config.get_text_config().vocab_size
    if config.start_from is None:
        shape = LlamaShape(
            vocab_size=vocab_size,
            width=config.width,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            intermediate=config.intermediate,
            context=context_of(target),
            head_size=config.width // config.heads,
            eos_token_id=tokenizer.eos_token_id,
        )
        return new_llama(shape, seed=config.seed).to(config.device)
    draft = load_causal_lm(config.start_from)
    if load_tokenizer(config.start_from).get_vocab() != tokenizer.get_vocab():
        raise VocabularyMismatchError(
            f"the draft in {config.start_from} has another tokenizer than the target: start from a draft that "
            "was made for this target's tokenizer, or from none"
        )
    if draft.config.vocab_size != vocab_size:
        raise VocabularyMismatchError(
            f"the draft in {config.start_from} has {draft.config.vocab_size} logits, the target {vocab_size}: "
            "start from a draft that was made for this target"
        )
    return draft.to(config.device)


def _streams(
    source: Source, written: Sequence[WrittenAnswer], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    answers = [[*record.prompt, *record.answer] for record in written]
    write_stream(source.texts, tokenizer, folder / _STREAM, answers)
    train = read_stream(folder / _STREAM)
    if source.held_out:
        write_stream(source.held_out, tokenizer, folder / "held_out.bin")
        return train, read_stream(folder / "held_out.bin")
    cut = len(train) - max(2, int(len(train) * _HELD_OUT_FRACTION))
    return train[:cut], train[cut:]
