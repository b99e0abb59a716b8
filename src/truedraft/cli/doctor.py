"""`truedraft doctor`: diagnoses a drafter and predicts its speedup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from truedraft.cli.failures import DONE, FAILED
from truedraft.cli.prompts import HELDOUT, PROMPTS_HELP, NamedPrompt, read_prompts
from truedraft.cli.session import ReportOptions, load_alone, quiet_hub, with_model
from truedraft.cli.terminal import Terminal, interval_text
from truedraft.drafters.registry import TrainedDrafter
from truedraft.errors import ModelError, OptionError, PromptError, errors_about
from truedraft.files import user_path
from truedraft.measure.peers.calling import Caller
from truedraft.measure.peers.endpoint import served_acceptance
from truedraft.options import MachineOptions, ModelOptions, flag, group, option

if TYPE_CHECKING:
    from truedraft.measure.doctor import Diagnosis, Prompt
    from truedraft.models.base import LanguageModel

_PROMPTS, _LEAST_PROMPTS, _TOKENS = 24, 12, 64  # the minimum is that of `examine`
_PATIENCE_S = 20.0
_BELOW_CARD = 0.9  # of the card's value; less counts as below it


@dataclass(frozen=True)
class WhatToExamine:
    """What is examined, and on which prompts."""

    drafter: str | None = option(
        None,
        "A folder of heads or of a draft model, or a GGUF file; its kind may precede it, as KIND:DIR. With --url, "
        "its card says which acceptance to expect.",
        "[KIND:]PATH",
    )
    url: str | None = option(
        None, "A running server: its acceptance is read from its metrics, and no model is loaded.", "URL"
    )
    prompts: str = option(HELDOUT, f"{PROMPTS_HELP[:-1]}, best of your own.", "FILE")
    limit: int = option(_PROMPTS, "Only so many prompts, evenly over the set.", "N", least=_LEAST_PROMPTS)
    tokens: int = option(_TOKENS, "Of an answer.", "N", least=2)
    plain: bool = flag("Give prompts as they are, also where the model has a chat template.")
    fix: Path | None = option(None, "Write heads with what is better into this new folder.", "DIR")


@dataclass(frozen=True)
class DoctorOptions:
    """Options of `truedraft doctor`."""

    model: ModelOptions = group("Model and drafter")
    what: WhatToExamine = group("Model and drafter")
    report: ReportOptions = group("Report")
    machine: MachineOptions = group("Machine")


def doctor(options: DoctorOptions) -> int:
    """Find out why a drafter is accepted less than it could be, and say what it will bring on your prompts.

    The target answers the prompts, and the drafter is replayed on the answers, as are the variants that people get
    wrong: layers one off, norms, LM heads, tables of ids, rotations, chat templates, tokenizers and dtypes. The exit
    status is 1 where a fault was found.
    """
    what = options.what
    if what.url is not None:
        if what.fix is not None:
            raise OptionError("mends a drafter that is examined here; leave --url or it out", field="fix")
        return _served(what.url, what.drafter, options.report)
    if what.drafter is None:
        raise OptionError("is needed: the folder of the drafter that is to be examined", field="drafter")
    if what.fix is not None and what.fix.exists() and any(what.fix.iterdir() if what.fix.is_dir() else (what.fix,)):
        raise OptionError(f"{str(what.fix)!r} holds something; name a new folder", field="fix")
    return _examine(options, what.drafter)


def _examine(options: DoctorOptions, drafter: str) -> int:
    from truedraft.measure.bench import spread

    terminal, what = Terminal(), options.what
    with errors_about("prompts"):
        texts = spread(read_prompts(None, what.prompts), what.limit)
    model = with_model(options.model)
    target = load_alone(model, options.machine, terminal.err)
    from truedraft.measure.doctor import examine, promised_by
    from truedraft.measure.variants import case_of

    with errors_about("drafter"), quiet_hub():
        kind, case = case_of(drafter, target)
    card = TrainedDrafter.read(case.source.path) if case.source.path.is_dir() else None
    promised = {} if card is None else promised_by(card.figures, case.chain(case.part).limits.depth)
    prompts = written_prompts(target, texts, plain=what.plain)
    with terminal.progress("examining", 1000) as shown:
        found = examine(
            kind,
            case,
            prompts,
            tokens=what.tokens,
            promised=promised,
            progress=lambda done, total, remark: shown(1000 * done // max(total, 1), remark),
        )
    _print(found, terminal)
    written = None if what.fix is None else _fix(found, what.fix, terminal, model.model)
    status = FAILED if found.faults else DONE
    if options.report.json:
        record = {"command": "doctor", "status": status, "drafter": drafter, "model": target.name}
        terminal.json(record | {"prompts_file": what.prompts, "written": written} | found.as_dict())
    return status


def _served(url: str, drafter: str | None, report: ReportOptions) -> int:
    """Compare the drafts of a running server with the drafter's card."""
    terminal = Terminal()
    promised = _least_promise(drafter)
    with errors_about("url"):
        found = served_acceptance(Caller(url, timeout_s=_PATIENCE_S))
    value, low, high = found.tokens_per_call
    counts = found.by_drafter or {"all": (found.drafted, found.accepted)}
    rows = [
        (name or "a drafter", f"{drafted:,.0f}", f"{accepted:,.0f}", f"{accepted / max(drafted, 1):.0%}")
        for name, (drafted, accepted) in counts.items()
    ]
    terminal.table(("drafter", "drafted tokens", "accepted", ""), rows)
    shares = [each / found.drafts for each in found.by_position] if found.drafts else []
    if shares:
        terminal.print(f"accepted by position: {_shares(shares)}", style="dim")
    below = promised is not None and high < _BELOW_CARD * promised
    sentence = f"{value:.2f} [{low:.2f}, {high:.2f}] tokens per call where something was drafted"
    if promised is not None:
        how = "below" if below else "not below"
        sentence += f", {how} the {promised:.2f} that the card of {drafter} promises at the least"
    if below:
        sentence += f": examine it by truedraft doctor --drafter {drafter} --model M --prompts FILE"
    terminal.print(sentence, style="bold")
    status = FAILED if below else DONE
    if report.json:
        counted = {"drafts": found.drafts, "drafted_tokens": found.drafted, "accepted_tokens": found.accepted}
        terminal.json(
            {"command": "doctor", "status": status, "url": url, "tokens_per_call": [value, low, high], **counted}
            | {"by_position": shares, "by_drafter": dict(found.by_drafter), "promised": promised, "diagnosis": sentence}
        )
    return status


def _least_promise(drafter: str | None) -> float | None:
    """The fewest tokens per call on a drafter's card, because a server reports neither its temperature nor its draft
    sizes. Raises OptionError if there is no folder, or no card in it.
    """
    from truedraft.measure.variants import place_of

    if drafter is None:
        return None
    place = place_of(drafter)[1]
    if not place.exists():
        raise OptionError(f"there is no folder {str(place)!r}; check the path", field="drafter")
    card = TrainedDrafter.read(place)
    served = None if card is None else card.figures.get("served")
    rounds = [each.get("mean_acceptance_length") for each in served or () if isinstance(each, dict)]
    lengths = [each for each in rounds if isinstance(each, int | float)]
    if not lengths:
        raise OptionError(f"has no card that promises something: {drafter!r}; leave it out", field="drafter")
    return min(lengths)


def written_prompts(target: LanguageModel, texts: Sequence[NamedPrompt], *, plain: bool) -> list[Prompt]:
    """Prompts for the target, formatted by its chat template if it has one, unless `plain`."""
    from truedraft.engine.prompts import encode_prompt
    from truedraft.measure.doctor import Prompt

    chats = not plain and target.tokenizer is not None and bool(target.tokenizer.chat_template)
    found = []
    for each in texts:
        given = each.prompt if isinstance(each.prompt, str) else tuple(each.prompt)
        try:
            if chats and target.tokenizer is not None and isinstance(given, str):
                ids = target.tokenizer.chat([{"role": "user", "content": given}])
            else:
                ids = encode_prompt(target, each.prompt)
        except PromptError as error:
            raise PromptError(f"prompt {each.name}: {error}") from error
        found.append(Prompt(each.name, given, tuple(ids)))
    return found


def _print(found: Diagnosis, terminal: Terminal) -> None:
    rows = [
        (
            each.variant.name,
            interval_text(each.tokens_per_call),
            "" if each.gain is None else f"{each.gain.value:+.2f} [{each.gain.low:+.2f}, {each.gain.high:+.2f}]",
            f"{each.p_value:.2g}",
            "better" if each.better else "",
        )
        for each in found.trials
        if not each.reason
    ]
    given = ("as it is given", interval_text(found.given[0.0].tokens_per_call), "", "", "")
    terminal.table(("variant", "tokens per call", "more than as given", "p", ""), [given, *rows])
    left = ", ".join(each.variant.name for each in found.trials if each.reason)
    if left:
        terminal.print(f"not to be tried here: {left}", style="dim")
    was, now = (each[0.0].survival for each in (found.given, found.best))
    line = f"accepted by position, greedy: {_shares(was)}"
    if now != was:
        line += f"; mended: {_shares(now)}"
    terminal.print(line, style="dim")
    terminal.print(f"{found.noun}: {found.sentence}", style="bold")


def _fix(found: Diagnosis, folder: Path, terminal: Terminal, model: str) -> str | None:
    """Write a corrected drafter if other weights or sizes are better; returns the folder, or None."""
    from truedraft.drafters.heads.head import Head

    if not isinstance(found.part, Head) or not any(each.mends for each in found.faults):
        terminal.print(f"nothing is written into {folder}: no other weights or sizes are better")
        return None
    dtype = next(each.dtype for each in found.part.parameters())
    found.part.save(user_path(folder, ModelError), found.part.record, dtype=dtype)
    terminal.print(
        f"wrote {folder}: the same heads, mended; try it: truedraft doctor --model {model} --drafter {folder}"
    )
    return str(folder)


def _shares(found: Sequence[float]) -> str:
    return " / ".join(f"{each:.2f}" for each in found)
