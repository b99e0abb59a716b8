"""`truedraft certify sampler`."""

from __future__ import annotations

from dataclasses import dataclass

from truedraft.cli.certify import CertifyReport, Telling, TimeOptions, drawn_seed
from truedraft.options import group, option

_STEPS = 1000


@dataclass(frozen=True)
class SamplerOptions(TimeOptions):
    """Options of `truedraft certify sampler`."""

    sampler: str = option(
        meaning="A rejection sampler, called on worlds whose exact answer is known; docs/certify_engines.md says what "
        "it is given.",
        metavar="MODULE:FUNCTION",
        name="SAMPLER",
    )
    seed: int | None = option(None, "Decides all noise.", "S", shown_default="drawn", least=0)
    report: CertifyReport = group("Report")


def sampler(options: SamplerOptions) -> int:
    """Run a rejection sampler on worlds whose answer is known, and say whether it has the target's distribution.

    Exit status 0 if no deviation was found, 1 if it deviates, 3 if there was not enough evidence or something broke.
    """
    from truedraft.certify.samplers import certify_sampler, load_sampler
    from truedraft.cli.terminal import Terminal
    from truedraft.machine import machine_facts

    seconds, terminal = options.seconds, Terminal()
    with Telling.of("sampler", options.report, terminal) as telling:
        tested = load_sampler(options.sampler)
        with terminal.progress("certify", _STEPS) as show:
            report = certify_sampler(
                tested,
                seconds=seconds,
                seed=drawn_seed(options.seed),
                tell=lambda done: show(int(done * _STEPS), tested.name),
            )
        return telling.told(report, {"machine": machine_facts()})
