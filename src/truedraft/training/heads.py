"""Training heads of any kind on a target's own answers, from prompts to a folder of measured heads."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truedraft.core.stats import repeated_ngrams
from truedraft.drafters.heads.head import Head, HeadConfig, HeadRecord
from truedraft.errors import CompositionError, DataError, OptionError
from truedraft.machine import in_bytes
from truedraft.measure import TREE_TEMPERATURES
from truedraft.models.architecture import load_causal_lm
from truedraft.models.base import LanguageModel
from truedraft.models.embedded import FOR_HEADS, refuse_no_text
from truedraft.models.lm_head import LmHead
from truedraft.models.loading import load_model
from truedraft.text.tokenizer import Tokenizer
from truedraft.training.evaluate import EngineRound, measure_in_engine, predicted
from truedraft.training.head_config import Calibrated, HeadTrainingConfig
from truedraft.training.loop import (
    CHECKPOINT,
    LENGTHS,
    Callbacks,
    StepRecord,
    TrainingLoop,
    checkpoint_of,
    train_with_callbacks,
)
from truedraft.training.processes import Processes
from truedraft.training.report import Effort, HeadReport, HeadResult, write_head_card
from truedraft.training.texts.answer_writer import SELF, Watch, Writing, names_of, opening_of, write_answers
from truedraft.training.texts.data import load_tokenizer, read_data
from truedraft.training.texts.prompts import PromptSets, shuffled, split_prompts, standard_library_prompts
from truedraft.training.texts.self_distillation import SelfDistillationData, WindowSampler, WrittenAnswer, read_answers
from truedraft.training.workspace import (
    TRAINED,
    WORK,
    WRITTEN,
    TimeBudget,
    duration,
    exclusive_access,
    free_bytes,
    writing,
)

TRAIN_TEXT, TREE_TEXT = "train", "tree"
"""Names of the target's texts: for training, and for choosing trees and measuring."""
_TRAIN_WRITTEN = 0.9 * WRITTEN  # the rest is for the text for choosing trees
_FLOOR = 0.1  # share of the requested tokens below which the training would be almost nothing
_ENOUGH = 0.95  # share of the requested tokens that counts as all of them
_REPLAYED = 0.3  # share of the measuring time for choosing trees by replay
_REPEATS = 0.3  # mean share of repeated 8-grams of held-out answers from which it is reported
_LEAST_REPLAYED = 768  # positions, however little time there is
_LEAST_POSITIONS = 256  # of a step; with little time more steps are better than more positions
_MANY_STEPS = 200  # with so many, steps need not be smaller
_POSITIONS = "positions_per_step"
_MADE_UP_SIZE = 0.1  # of the entries of made-up vectors


@dataclass(frozen=True)
class HeadJob:
    """A training of heads; `step_s` is the seconds of a step, None before it was measured."""

    target: str
    prompts: PromptSets
    config: HeadTrainingConfig
    callbacks: Callbacks = field(default_factory=Callbacks)
    budget: TimeBudget = field(default_factory=TimeBudget)
    data: str = "prompts of the caller's"
    step_s: float | None = None

    def follow(self, what: str, done: int, total: int) -> None:
        self.callbacks.on_progress(what, done, total, "")

    def with_prompts(self, prompts: PromptSets) -> HeadJob:
        """With a time limit they are shuffled, so that those answered in time come from all of the text."""
        train = shuffled(prompts.train, self.config.seed) if self.budget.limited else prompts.train
        return replace(self, prompts=replace(prompts, train=train))


@dataclass(frozen=True)
class TargetText:
    """Texts that a target wrote, its fingerprint, and the `LanguageModel.sample` of its weights, if there is one."""

    train: SelfDistillationData
    tree: SelfDistillationData
    fingerprint: str
    sample: str | None = None

    def record(self, target: str) -> HeadRecord:
        return HeadRecord(target, self.fingerprint, sample=self.sample)


def train_heads(
    target: str | Path,
    data: Sequence[Path] | PromptSets,
    out: Path,
    config: HeadTrainingConfig,
    *,
    held_out: Sequence[Path] = (),
    callbacks: Callbacks | None = None,
    budget: TimeBudget | None = None,
) -> HeadResult:
    """Train heads for the target into the folder `out`, on text that the target writes, or resume.

    Stage 2 writes the new target to `out/target`, and the heads in `out` belong to it. Of several processes
    (`Processes`) all return the main one's result.

    Args:
        target: an embedded name, a folder, or a name on the Hugging Face hub.
        data: prompts, or files for `read_data`; with `SELF` the target writes prompts of its own. No files mean the
            standard library of the running interpreter, for the embedded target only.
        held_out: files with prompts for choosing trees and for measuring; without them the end of the data.
        budget: the time for everything, measuring included; None sets no limit.

    Raises:
        ModelError: the target cannot be loaded, or heads cannot share its LM head or its embedding.
        DataError: the data cannot be read, or the target's answers are shorter than the heads reach.
        OptionError: `out` holds a training with another configuration, another process is training there, or the sizes
            are invalid for the target.
        CompositionError: the heads to start from do not fit the target.
        MissingExtraError: stage 2 of a large target needs peft.
        TrainingError: the loss is not finite, or files cannot be written.
    """
    from truedraft.training import joint  # here, because it imports this module

    processes = Processes.here()
    if not processes.main:
        return _train_beside(str(target), out / WORK, config.device)
    job = _job_for(target, data, held_out, config, callbacks or Callbacks(), budget or TimeBudget())
    if config.stage == 2 and job.budget.limited:
        raise OptionError("minutes are a limit for stage 1; stage 2 takes as long as its steps and joint steps do")
    with exclusive_access(out / WORK):
        if not (out / WORK / CHECKPOINT).is_file() and (config.stage == 1 or config.start_from is None):
            job = forecast(job, out / WORK)
        model = load_model(job.target, device=config.device)
        _refuse_early(job, model)
        job.budget.loaded()
        if not isinstance(data, PromptSets) and SELF in data:
            job = _with_questions(job, model, data, held_out, out / WORK)
        text = write_texts(job, model, out / WORK)
        del model  # training needs only the LM head
        if config.stage == 2:
            result = joint.train_jointly(job, text, out)
        else:
            result = HeadResult(out, *train_stage_1(job, text, out, out / WORK))
        write_head_card(result, config.head.kind, job.target, job.data, config.device)
        return processes.from_main(result)


def _train_beside(target: str, work: Path, device: str) -> HeadResult:
    processes = Processes.here()
    given: tuple[Any, ...] = processes.from_main(None)
    prompts, config, fingerprint = given
    job = HeadJob(target, prompts, replace(config, device=device))
    lm_head = lm_head_of(target, device)
    head = starting_head(job, lm_head, fingerprint)
    train, tree = (read_answers(work, name, lm_head.weight.shape[1]) for name in (TRAIN_TEXT, TREE_TEXT))
    _loop(job, head, lm_head, TargetText(train, tree, fingerprint), work).run()
    return processes.from_main(None)


def _job_for(
    target: str | Path,
    data: Sequence[Path] | PromptSets,
    held_out: Sequence[Path],
    config: HeadTrainingConfig,
    callbacks: Callbacks,
    budget: TimeBudget,
) -> HeadJob:
    words = "prompts of the caller's"
    if isinstance(data, PromptSets):
        prompts = data
    else:
        # The target's own questions are not known yet; openings of questions take their place.
        prompts = _prompts_of(target, data, held_out, config, lambda tokenizer, count: [opening_of(tokenizer)] * count)
        _check_amount(prompts, config, callbacks.on_note)
        words = names_of(data) or "the standard library of Python"
    return HeadJob(str(target), prompts, config, callbacks, budget, words).with_prompts(prompts)


def _with_questions(
    job: HeadJob, model: LanguageModel, data: Sequence[Path], held_out: Sequence[Path], folder: Path
) -> HeadJob:
    begun = job.budget.limited and (folder / f"{TRAIN_TEXT}.json").is_file()
    pen = Writing(job.config.tokens, job.config.writing, folder, job.callbacks, job.budget, begun)
    prompts = _prompts_of(job.target, data, held_out, job.config, lambda tokenizer, count: pen.questions(model, count))
    if not job.budget.limited:  # otherwise it wrote as many as there was time for
        _check_amount(prompts, job.config, job.callbacks.on_note)
    return job.with_prompts(prompts)


def _prompts_of(
    target: str | Path,
    data: Sequence[Path],
    held_out: Sequence[Path],
    config: HeadTrainingConfig,
    questions: Callable[[Tokenizer, int], Sequence[Sequence[int]]],
) -> PromptSets:
    refuse_no_text(str(target), data, FOR_HEADS)
    tokenizer = load_tokenizer(target)
    if not data:
        return standard_library_prompts(tokenizer, config.prompts, config.prompt_tokens)
    texts, prompts = read_data([path for path in data if path != SELF], tokenizer, empty=SELF in data)
    others, held_out_prompts = read_data(held_out, tokenizer, empty=not held_out)
    if SELF in data:
        count = config.prompts.train + config.prompts.held_out
        prompts += map(list, questions(Tokenizer(tokenizer, str(target)), max(count // 2, count - len(prompts))))
    counts, length, mixed = config.prompts, config.prompt_tokens, shuffled(prompts, config.seed)
    found = split_prompts(texts, others, tokenizer, counts, length, prompts=mixed, held_out_prompts=held_out_prompts)
    part = "" if held_out or prompts else "the end of "
    return replace(found, source=part + names_of(held_out or data))


def _check_amount(prompts: PromptSets, config: HeadTrainingConfig, on_note: Callable[[str], None]) -> None:
    required = config.prompts
    separate = len(prompts.train) if prompts.apart is None else prompts.apart
    if separate < _ENOUGH * required.train:
        got = (
            f"the text gives {separate:,} prompts that share nothing, for about "
            f"{separate * config.writing.answer_tokens:,} tokens by the target, and {config.tokens:,} are asked for"
        )
        if separate < _FLOOR * required.train:
            raise DataError(f"{got}: give more text, or ask for fewer tokens")
        on_note(f"{got}; heads learn more from more text")
    if len(prompts.tree) < _ENOUGH * required.tree or len(prompts.test) < _ENOUGH * required.test:
        on_note(
            f"the held-out text gives {len(prompts.tree)} of {required.tree} prompts to choose trees on, and "
            f"{len(prompts.test)} of {required.test} to measure on: with more text the figures are surer"
        )


def _refuse_early(job: HeadJob, model: LanguageModel) -> None:
    from truedraft.training.joint import check_adapters, rank_for

    config = job.config
    if config.stage == 2:
        Processes.here().refuse_several("stage 2 trains target and heads")
    sizes = config.sizes(model.head_width, model.vocab_size)
    with torch.device("meta"):
        reads_tokens = config.head(sizes).reads_tokens
    if reads_tokens:
        model.embed(torch.zeros(1, dtype=torch.int64, device=model.device))
    if config.start_from is not None:
        _to_start_from(job, config.start_from, model.fingerprint)
    rank = config.joint.lora_rank
    if config.stage == 2 and (rank_for(model.parameters) if rank is None else rank):
        check_adapters()


def write_texts(job: HeadJob, model: LanguageModel, folder: Path) -> TargetText:
    """Let the target answer all prompts for training and for choosing trees.

    Raises OptionError for a folder with other answers, TrainingError if the target or writing the files fails.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    watch = replace(_watch(job, folder, _TRAIN_WRITTEN), on_forecast=lambda left_s: _say_what_fits(job, left_s))
    train = write_answers(model, job.prompts.train, folder, TRAIN_TEXT, job.config.writing, watch=watch)
    if len(train.records) < len(job.prompts.train):
        got = f"{len(train.tokens):,} of about {job.config.tokens:,} tokens"
        job.callbacks.on_note(f"in the time given the target wrote {got}")
    return TargetText(train, write_tree_text(job, model, folder, TREE_TEXT), model.fingerprint, model.sample)


def _say_what_fits(job: HeadJob, left_s: float) -> None:
    budget, config, all_tokens = job.budget, job.config, job.config.writing.answer_tokens * len(job.prompts.train)
    within_s = min(left_s, budget.left_s(_TRAIN_WRITTEN))
    job.callbacks.on_plan(f"writing takes about {duration(within_s)}")
    if budget.limited and job.step_s is not None:
        tokens = int(all_tokens * within_s / max(left_s, 1e-9))
        requested, most = (
            config.schedule(max(1, count // config.window)).total_steps for count in (all_tokens, tokens)
        )
        steps = budget.steps(most, job.step_s, begin=WRITTEN)
        words = f"about {tokens:,} tokens of text and {steps:,} steps of training, {job.step_s:.2g} s each"
        budget.buys(steps, requested, words, job.callbacks.on_note)


def write_tree_text(job: HeadJob, model: LanguageModel, folder: Path, name: str) -> SelfDistillationData:
    """The target's answers to the prompts for trees, at each temperature that trees are counted at."""
    temperatures = tuple(TREE_TEMPERATURES.values())
    prompts = list(itertools.chain.from_iterable([prompt] * len(temperatures) for prompt in job.prompts.tree))
    config = replace(job.config.writing, temperatures=temperatures, seed=job.config.writing.seed + 1)

    watch = replace(_watch(job, folder, WRITTEN), what="writing text for trees", on_forecast=lambda left_s: None)
    return write_answers(model, prompts, folder, name, config, watch=watch)


def _watch(job: HeadJob, folder: Path, share: float) -> Watch:
    """Ends the writing at a share of the time; a resumed training keeps the text that it has."""
    begun = job.budget.limited and (folder / CHECKPOINT).is_file()
    return Watch(callbacks=job.callbacks, budget=job.budget, share=share, begun=begun)


def train_stage_1(job: HeadJob, text: TargetText, out: Path, work: Path) -> tuple[HeadReport, Effort]:
    """Train, save and measure heads of a frozen target on its text, in `work` or above; errors of `train_heads`."""
    lm_head = lm_head_of(job.target, job.config.device)
    head = starting_head(job, lm_head, text.fingerprint)
    job = replace(job, config=_within_budget(job, text, head.reach, work))
    loop = _loop(job, head, lm_head, text, work)
    Processes.here().from_main((job.prompts, job.config, text.fingerprint))  # see `_train_beside`
    effort = run(job, loop, text)
    return judge(job, head, lm_head, text.record(job.target), text.tree, out, effort), effort


def _loop(job: HeadJob, head: Head, lm_head: LmHead, text: TargetText, work: Path) -> TrainingLoop:
    texts = text.train, text.tree
    return job.config.loop(head, lm_head, job.target, texts, text.fingerprint, work, job.follow)


def _within_budget(job: HeadJob, text: TargetText, reach: int, work: Path) -> HeadTrainingConfig:
    config = job.config
    if not job.budget.limited:
        return config
    checkpoint = checkpoint_of(work)
    if checkpoint is not None:
        steps = sum(int(checkpoint[1][name] or 0) for name in LENGTHS)
        return replace(config, steps=steps, positions_per_step=int(checkpoint[1][_POSITIONS] or 0))
    windows = WindowSampler(text.train, reach, config.window, config.seed).windows
    return replace(config, steps=job.budget.steps(config.schedule(len(windows)).total_steps, job.step_s or 0.0))


def _fitting(
    job: HeadJob, text: SelfDistillationData, replay: Callable[[SelfDistillationData], object]
) -> SelfDistillationData:
    """The part of the held-out text that there is time to replay, judging by a small part."""
    little, left_s = text.beginnings(_LEAST_REPLAYED), job.budget.left_s()
    if not job.budget.limited or len(little.tokens) == len(text.tokens):
        return text
    replay(little)
    took_s = left_s - job.budget.left_s()
    return text.beginnings(
        max(_LEAST_REPLAYED, int(len(little.tokens) * _REPLAYED * job.budget.left_s() / max(took_s, 1e-9)))
    )


def lm_head_of(target: str, device: str) -> LmHead:
    """The target's LM head in bfloat16, without the rest of the model; UnsupportedModelError if it cannot be shared."""
    return LmHead.of(load_causal_lm(target, dtype="auto", device=device).eval())


def starting_head(job: HeadJob, lm_head: LmHead, fingerprint: str) -> Head:
    """New heads, or those to start from; CompositionError if these do not fit, ModelError if unreadable."""
    head, folder = job.config.new_head(lm_head), job.config.start_from
    if folder is None:
        return head
    found = _to_start_from(job, folder, fingerprint, head.config)
    if head.config != found.config:  # which includes the layers
        head = job.config.head(found.config).to(job.config.device)
    head.load_state_dict(found.float().state_dict())
    return head


def _to_start_from(job: HeadJob, folder: Path, fingerprint: str, required: HeadConfig | None = None) -> Head:
    """Heads for the target; `required` None: of any sizes, as the target's vocabulary is not known yet."""
    found = job.config.head.load(folder)
    if found.record.fingerprint not in (None, fingerprint):
        raise CompositionError(
            f"the heads in {str(folder)!r} were trained for {found.record.target_name} (fingerprint "
            f"{found.record.fingerprint}), and the target is {job.target} (fingerprint {fingerprint}); start from "
            "heads that were trained for it, or from none"
        )
    sizes: Any = required or job.config.sizes(found.config.width, found.config.vocab_size)
    own: Any = found.config
    has, requested = asdict(own), asdict(sizes)
    if requested.get("layers") == ():  # the default layers
        requested["layers"] = has["layers"]
    if other := [f"{name} {has[name]}, not {requested[name]}" for name in has if has[name] != requested[name]]:
        raise CompositionError(
            f"the heads in {str(folder)!r} have {', '.join(other)} as asked for; ask for the same sizes, or start from "
            "none"
        )
    return found


def judge(
    job: HeadJob,
    head: Head,
    lm_head: LmHead,
    record: HeadRecord,
    held_out: SelfDistillationData,
    out: Path,
    effort: Effort,
) -> HeadReport:
    """Save trained heads to `out`, calibrate them on held-out text, and measure them in the engine."""
    head = head.eval().requires_grad_(False).to(torch.bfloat16)  # as saved and served
    record = replace(record, facts=asdict(effort))
    head.save(out, record)
    target = load_model(record.target_name, device=job.config.device)

    def replayed(text: SelfDistillationData) -> tuple[Calibrated, list[EngineRound]]:
        calibrated = job.config.calibrate(head, lm_head, target, text, job.follow)
        rounds: list[EngineRound] = []
        for number, each in enumerate(calibrated.rounds):
            about = dict(each.about)
            if "promised" not in about:
                job.follow("predicting", number, number + 1)
                drafter = each.new_drafter()
                found = predicted(target, text, each.temperature, drafter, [drafter.limits.nodes])
                about["promised"] = found[0].value if found else None
            rounds.append(replace(each, about=about))
        return calibrated, rounds

    held_out = _fitting(job, held_out, replayed)
    found, rounds = replayed(held_out)
    follow = functools.partial(job.follow, "measuring")
    measured = measure_in_engine(target, rounds, job.prompts.test, on_progress=follow, budget=job.budget)
    promised_by = len(held_out.tokens) // len(TREE_TEMPERATURES)  # one answer per prompt and temperature
    promised_on = job.prompts.promised_on + _repeats(held_out)
    report = HeadReport(found.facts, measured, promised_on, promised_by)
    head.save(out, replace(record, trees=found.trees, facts={**record.facts, **report.as_dict()}))
    return report


def _repeats(text: SelfDistillationData) -> str:
    shares = [share for each in text.records if (share := repeated_ngrams(each.answer)) is not None]
    mean = sum(shares) / len(shares) if shares else 0.0
    if mean < _REPEATS:
        return ""
    return f" (THE TARGET REPEATS ITSELF THERE: {mean:.0%} of 8-grams occurred before in their answer)"


def run(job: HeadJob, loop: TrainingLoop, text: TargetText) -> Effort:
    """Train, report the last measurement on held-out answers, and return the effort."""
    right = ""

    def remark(record: StepRecord) -> str:
        nonlocal right
        shares = [f"{value:.2f}" for name, value in record.values.items() if name.endswith("_top_1")]
        right = f", {job.config.head.place_word}s right {' '.join(shares)}" if shares else right
        return f"loss {record.values['loss']:.3f}{right}"

    progress = train_with_callbacks(loop, job.callbacks, remark, lambda: job.budget.over(TRAINED))
    return Effort(len(text.train.tokens), progress.step, progress.tokens, progress.elapsed_s)


def forecast(job: HeadJob, work: Path) -> HeadJob:
    """The job with the seconds of a step; reports disk space and time. UnsupportedModelError as `lm_head_of`."""
    lm_head = lm_head_of(job.target, job.config.device)
    job, checkpoint = _tried(job, lm_head)
    config, step_s = job.config, job.step_s or 0.0
    answers = len(job.prompts.train) + len(TREE_TEMPERATURES) * len(job.prompts.tree)
    tokens, all_tokens = (count * config.writing.answer_tokens for count in (len(job.prompts.train), answers))
    disk = all_tokens * 2 * lm_head.weight.shape[1] + tokens * config.bytes_per_token
    disk += 2 * checkpoint  # the old one stays until the new one is written
    free = free_bytes(work)
    room = f"of which {in_bytes(free)} are free" if free >= disk else f"where only {in_bytes(free)} are free"
    most = config.schedule(max(1, tokens // config.window)).total_steps
    steps = job.budget.steps(most, step_s, begin=WRITTEN)
    took = f"about {duration(steps * step_s)} ({step_s:.2g} s each)"
    job.budget.buys(steps, most, f"{steps:,} steps of training, {step_s:.2g} s each", lambda note: None)
    within = f", all within {job.budget.minutes:g} minutes" if job.budget.limited else ""
    job.callbacks.on_plan(
        f"the target writes up to {tokens:,} tokens to train on; with their vectors and a checkpoint they take up to "
        f"{in_bytes(disk)} of the disk of {str(work)!r}, {room}; then come {steps:,} steps of training, {took}{within}"
    )
    return job


def _tried(job: HeadJob, lm_head: LmHead) -> tuple[HeadJob, int]:
    """The job with the seconds of a step, of fewer positions where few would fit, and the bytes of a checkpoint."""
    config, whole = job.config, job.config.positions_per_step
    size = min(whole, _LEAST_POSITIONS) if job.budget.limited else whole
    step_s, checkpoint = _trial(replace(job, config=replace(config, positions_per_step=size)), lm_head)
    least = size
    while size < whole and job.budget.steps(_MANY_STEPS, 2 * step_s, begin=WRITTEN) == _MANY_STEPS:
        size, step_s = min(2 * size, whole), 2 * step_s
    job = replace(job, config=replace(config, positions_per_step=size))
    if size > least:
        step_s, checkpoint = _trial(job, lm_head)  # usually less than the doubled estimate
    return replace(job, step_s=step_s), checkpoint


def _trial(job: HeadJob, lm_head: LmHead) -> tuple[float, int]:
    """Seconds of a step on a made-up text, and bytes of a checkpoint."""
    config, head = job.config, job.config.new_head(lm_head)
    vocab, width = lm_head.weight.shape
    length = max(config.writing.answer_tokens, head.reach + 2)
    count = 2 + config.positions_per_step // (length - head.reach)
    random = np.random.default_rng(config.seed)
    records = [WrittenAnswer([0], random.integers(vocab, size=length).tolist(), 1.0, False) for _ in range(count)]
    vectors = random.standard_normal((count * length, width), dtype=np.float32) * np.float32(_MADE_UP_SIZE)
    bits = torch.from_numpy(vectors).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    data = SelfDistillationData(records, bits)
    text = TargetText(data, data, "")
    with tempfile.TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
        return _loop(replace(job, callbacks=Callbacks()), head, lm_head, text, Path(place)).trial()
