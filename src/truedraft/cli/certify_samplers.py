"""`truedraft certify --sampler MODULE:FUNCTION`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from truedraft.cli.certify import CertifyOptions, concluded, first_seed, write_report
from truedraft.cli.failures import DONE, FAILED, UNDECIDED

if TYPE_CHECKING:
    from truedraft.certify.samplers import SamplerCertificate
    from truedraft.cli.terminal import Terminal

_STEPS = 1000


def certify_one_sampler(options: CertifyOptions, folder: Path | None) -> int:
    """Run a sampler on worlds whose answer is known, and tell what came of it.

    Args:
        options: of the command.
        folder: for the report; None writes none.

    Returns:
        Exit status 0 if it is lossless, 1 if it deviates, 3 if there was not enough evidence.

    Raises:
        OptionError: it is no sampler, or failed.
    """
    from truedraft.certify.checks import Status
    from truedraft.certify.samplers import certify_sampler, load_sampler, markdown
    from truedraft.cli.terminal import Terminal

    sampler = load_sampler(options.others.sampler or "")
    terminal = Terminal()
    with terminal.progress("certify", _STEPS) as show:
        certificate = certify_sampler(
            sampler,
            seconds=options.check.minutes * 60.0,
            seed=first_seed(options),
            tell=lambda done: show(int(done * _STEPS), sampler.name),
        )
    record, circumstances = _record(certificate)
    _show(certificate, terminal)
    status = {Status.HOLDS: DONE, Status.FAILS: FAILED}.get(certificate.status, UNDECIDED)
    page = markdown(certificate, circumstances)
    return concluded(status, options, record, terminal, lambda: write_report(folder, page, record, terminal))


def _record(certificate: SamplerCertificate) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON record, and what of it tells the circumstances."""
    from truedraft.certify.samplers import as_dict
    from truedraft.machine import machine_facts

    circumstances = {"parameters": ", ".join(certificate.parameters), "seed": certificate.seed} | machine_facts()
    return {"command": "certify"} | as_dict(certificate) | {"machine": machine_facts()}, circumstances


def _show(certificate: SamplerCertificate, terminal: Terminal) -> None:
    from truedraft.certify.samplers import headings, place_headings, place_rows, sentences, verdict, world_rows
    from truedraft.cli.terminal import print_table

    print_table(headings(), list(world_rows(certificate)), terminal.out)
    print_table(place_headings(), list(place_rows(certificate)), terminal.out)
    terminal.out.print(verdict(certificate), style="bold", soft_wrap=True)
    for line in sentences(certificate):
        terminal.note(line)
