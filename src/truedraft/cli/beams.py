"""`generate --num-beams`: speculative or plain beam search; both in alternation with --compare."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from truedraft.cli.failures import DONE, FAILED, warn
from truedraft.cli.prompts import PromptRequest, read_prompts
from truedraft.cli.session import load_target, loading, prepare_prompts, sampling_of_each, with_model
from truedraft.cli.terminal import Terminal, say, visible
from truedraft.core.params import SamplingParams
from truedraft.drafters.specs import draft_from_spec
from truedraft.errors import DataError, OptionError, TruedraftError
from truedraft.options import changed_fields, check_whole, option, record_of

if TYPE_CHECKING:
    from truedraft.cli.generate import GenerateOptions
    from truedraft.engine import Beam, BeamAnswer, BeamSearch

_RUNS_OF_ONE_PROMPT = 3
_EARLY = {"true": True, "false": False, "never": "never"}
_LEFT_OUT = {
    "stack": ("adapters", "rule", "controller", "plan", "max_cache_bytes", "gpu_memory_utilization"),
    "report": ("show_drafts", "explain"),
    "prompts": ("image",),
}
_PLAIN, _SPECULATIVE = "plain", "speculative"
_COUNTS = ("steps", "target_calls", "drafted")
_Search: TypeAlias = "tuple[BeamAnswer, float]"  # a finished beam search, and its seconds


@dataclass(frozen=True)
class BeamOptions:
    """Beam search in place of sampling, with the names and meanings of transformers' `generate`."""

    num_beams: int = option(
        1, "Beam search of this width, with --drafter draft:MODEL or none; 1 is none.", "W", least=1
    )
    draft_beams: int | None = option(
        None, "Beams of the draft, at least as many.", "U", shown_default="twice as many", least=1
    )
    length_penalty: float = option(1.0, "Divide scores by the length to this power.", "P")
    early_stopping: str = option(
        "false",
        "true ends once there are as many ended beams as --num-beams; false once the best running one is worse at its "
        "length; never once it can no longer become better.",
        "WHEN",
    )
    num_return_sequences: int = option(1, "Write so many of the best beams.", "N", least=1)


@dataclass(slots=True)
class _Found:
    name: str
    prompt_tokens: int = 0
    searches: dict[str, list[_Search]] = field(default_factory=dict)  # runs; without --compare one "speculative" one
    error: str | None = None

    @property
    def beams(self) -> Sequence[Beam]:
        """The beams of speculative search, the best first."""
        return self.searches[_SPECULATIVE][0][0].beams

    @property
    def identical(self) -> bool:
        """Whether all runs found the same beams in the same order."""
        runs = [answer for searches in self.searches.values() for answer, _ in searches]
        return len({tuple(beam.token_ids for beam in answer.beams) for answer in runs}) == 1

    @property
    def speedup(self) -> float:
        """Time of plain search over that of speculative search, medians of the runs."""
        return self.median_s(_PLAIN) / self.median_s(_SPECULATIVE)

    def median_s(self, way: str) -> float:
        return statistics.median(elapsed_s for _, elapsed_s in self.searches[way])

    def total(self, way: str, count: str) -> int:
        return int(getattr(self.searches[way][0][0], count))

    def counts(self, way: str) -> dict[str, Any]:
        return {"elapsed_s": self.median_s(way)} | record_of(self.searches[way][0][0], *_COUNTS)


def search_beams(options: GenerateOptions) -> int:
    """Beam search of each prompt, one after another."""
    _check(options)
    prompts = read_prompts(options.prompts.prompt, options.prompts.prompts, own_options=True)
    seeing = next((each.name for each in prompts if each.images), None)
    if seeing is not None:
        raise DataError(f"prompt {seeing} has images, and beam search reads text only; leave out --num-beams, or them")
    requests = sampling_of_each([(each, options.sampling) for each in prompts])
    for _, params in requests:
        _check_sampling(params)

    terminal, options = Terminal(), dataclasses.replace(options, stack=with_model(options.stack))
    plain, search = _load(options, terminal)
    requests = prepare_prompts(search.target, requests, options.prompts)
    found = [_answer(each, plain, search, options, terminal, single=len(requests) == 1) for each in requests]
    searched = [each for each in found if each.error is None]
    compared = options.report.compare and bool(searched)
    if compared:
        _print_comparison(searched, search, options, terminal)
    elif searched:
        terminal.note(_line(searched, options))
    if searched and search.target.note is not None and not compared:
        terminal.note(search.target.note)
    same = not compared or all(each.identical for each in searched)
    status = DONE if same and len(searched) == len(found) else FAILED
    if options.report.json:
        terminal.json(_record(found, search, options) | {"status": status})
    return status


def _check(options: GenerateOptions) -> None:
    beams = options.beams
    if beams.num_beams == 1 and (given := changed_fields(beams)):
        raise OptionError("is of beam search; give --num-beams of 2 or more, too", field=given[0])
    if beams.early_stopping not in _EARLY:
        raise OptionError(f"must be true, false or never, got {beams.early_stopping!r}", field="early_stopping")
    if beams.num_return_sequences > beams.num_beams:
        message = f"must be at most --num-beams, {beams.num_beams}, got {beams.num_return_sequences}"
        raise OptionError(message, field="num_return_sequences")
    if beams.draft_beams is not None:
        check_whole("draft_beams", beams.draft_beams, beams.num_beams)
    for part, names in _LEFT_OUT.items():
        for name in changed_fields(getattr(options, part)):
            if name in names:
                raise OptionError("does not go with --num-beams; leave one of them out", field=name)
    _check_sampling(options.sampling)


def _check_sampling(params: SamplingParams) -> None:
    for name in changed_fields(params):
        if name != "max_tokens":
            raise OptionError(
                "does not go with --num-beams: beam search draws nothing, and uses only --max-tokens of the options "
                "of answers",
                field=name,
            )


def _load(options: GenerateOptions, terminal: Terminal) -> tuple[BeamSearch, BeamSearch]:
    """Plain search, and search with the draft."""
    from truedraft.engine import BeamSearch

    stack, beams = options.stack, options.beams
    with loading(terminal.err, stack.model):
        target = load_target(stack, options.machine)
        draft = draft_from_spec(stack.drafter, target, stack.drafters_dir, tell=warn)
        more = record_of(beams, "num_beams", "length_penalty") | {"early_stopping": _EARLY[beams.early_stopping]}
        plain = BeamSearch(target, **more)
        if draft is None:
            return plain, plain
        more |= {"draft_beams": beams.draft_beams, "num_speculative_tokens": draft.limits.depth}
        return plain, BeamSearch(target, draft.model, **more)


def _answer(
    request: PromptRequest,
    plain: BeamSearch,
    search: BeamSearch,
    options: GenerateOptions,
    terminal: Terminal,
    *,
    single: bool,
) -> _Found:
    """Search the beams of one prompt and write them; if one of several prompts fails, warn and skip it."""
    from truedraft.engine.prompts import encode_prompt

    prompt, params = request
    found = _Found(prompt.name)
    try:
        ids = encode_prompt(search.target, prompt.prompt)
        found.prompt_tokens = len(ids)
        first = _timed(search, ids, params.max_tokens)
        _write(found.name if not single else None, first[0].beams, options, terminal)
        if not options.report.compare:
            found.searches = {_SPECULATIVE: [first]}
            return found
        # The first search was the warm-up and is not counted.
        found.searches = {_PLAIN: [], _SPECULATIVE: []}
        for _ in range(_RUNS_OF_ONE_PROMPT if single else 1):
            for way, system in ((_PLAIN, plain), (_SPECULATIVE, search)):
                found.searches[way].append(_timed(system, ids, params.max_tokens))
    except TruedraftError as error:
        if single:
            raise
        found.error = str(error)
        say(f"error: prompt {prompt.name}: {error}")
    return found


def _timed(search: BeamSearch, ids: Sequence[int], max_tokens: int) -> _Search:
    started = time.perf_counter()
    return search.generate(ids, max_tokens), time.perf_counter() - started


def _write(name: str | None, beams: Sequence[Beam], options: GenerateOptions, terminal: Terminal) -> None:
    """Write the requested beams; a single beam of a single prompt without a heading, all others after one."""
    returned = beams[: options.beams.num_return_sequences]
    for number, beam in enumerate(returned, start=1):
        terminal.end_line()
        if name is not None or options.beams.num_return_sequences > 1:
            prefix = "" if name is None else f"{name}, "
            terminal.heading(f"{prefix}beam {number} (score {beam.score:.4f})")
        terminal.write(" ".join(map(str, beam.token_ids)) if beam.text is None else visible(beam.text))
        terminal.end_line()


def _line(found: Sequence[_Found], options: GenerateOptions) -> str:
    steps, calls, drafted = (sum(each.total(_SPECULATIVE, count) for each in found) for count in _COUNTS)
    elapsed_s = sum(each.median_s(_SPECULATIVE) for each in found)
    parts = [f"{options.beams.num_beams} beams", f"{steps} steps in {calls} calls of the target in {elapsed_s:.2f} s"]
    if drafted:
        parts.append(f"{drafted} nodes drafted")
    if len(found) == 1 and found[0].beams:
        parts.append(f"score {found[0].beams[0].score:.4f}")
    return " · ".join(parts)


def _print_comparison(
    found: Sequence[_Found], search: BeamSearch, options: GenerateOptions, terminal: Terminal
) -> None:
    from truedraft.cli.report import name_and_note
    from truedraft.machine import dtype_name

    ways = (_PLAIN, _SPECULATIVE)
    rows = [["seconds", *(f"{sum(each.median_s(way) for each in found):.2f}" for way in ways)]]
    for label, count in (("target calls", "target_calls"), ("steps", "steps"), ("drafted nodes", "drafted")):
        rows.append([label, *(f"{sum(each.total(way, count) for each in found):,}" for way in ways)])
    terminal.out.print()
    runs = f"medians of {_RUNS_OF_ONE_PROMPT} runs each way" if len(found) == 1 else f"{len(found)} prompts"
    draft, width = search.draft, options.beams.num_beams
    drafting = "no draft" if draft is None else f"draft {name_and_note(draft)}, {search.draft_beams} beams of it"
    how = f"{width} beams, {drafting}, {dtype_name(search.target.dtype)}, {runs}"
    terminal.print(f"{name_and_note(search.target)}, {how}", style="dim")
    terminal.table(("", *ways), rows)
    mean = " geometric mean" if len(found) > 1 else ""
    terminal.out.print(f"speed-up:{mean} {_speedup(found):.2f}")
    same = sum(each.identical for each in found)
    count = f" ({same} of {len(found)})" if len(found) > 1 else ""
    terminal.out.print(f"identical: {'yes' if same == len(found) else 'no'}{count}")


def _speedup(found: Sequence[_Found]) -> float:
    return statistics.geometric_mean(each.speedup for each in found)


def _record(found: Sequence[_Found], search: BeamSearch, options: GenerateOptions) -> dict[str, Any]:
    from truedraft.cli.report import target_record

    searched = [each for each in found if each.error is None]
    record: dict[str, Any] = {"command": "generate", "failed_prompts": len(found) - len(searched)}
    if options.report.compare:
        record["speedup"] = _speedup(searched) if searched else None
        record["identical"] = all(each.identical for each in searched) if searched else None
    seconds = sum(each.median_s(_SPECULATIVE) for each in searched)
    tokens = sum(len(each.beams[0].token_ids) for each in searched if each.beams)
    record |= {"elapsed_s": seconds, "tokens_per_s": tokens / seconds if seconds else 0.0}
    record["prompts"] = [_prompt_record(each, options) for each in found]
    how = dataclasses.asdict(options.beams) | {"early_stopping": _EARLY[options.beams.early_stopping]}
    draft = None if search.draft is None else search.draft.name
    how |= {"draft_beams": None if draft is None else search.draft_beams, "num_speculative_tokens": search.depth}
    how |= {"max_tokens": options.sampling.max_tokens, "draft": draft}
    return record | how | target_record(search.target, options.stack)


def _prompt_record(found: _Found, options: GenerateOptions) -> dict[str, Any]:
    about = {"id": found.name, "prompt_tokens": found.prompt_tokens, "error": found.error}
    if found.error is not None:
        return about
    returned = found.beams[: options.beams.num_return_sequences]
    beams = {"beams": [dataclasses.asdict(beam) for beam in returned]}
    if not options.report.compare:
        return about | beams | found.counts(_SPECULATIVE)
    sides = {way: found.counts(way) for way in found.searches}
    return about | beams | {"speedup": found.speedup, "identical": found.identical} | sides
