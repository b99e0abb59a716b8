"""From which temperature on drawn beams of a recurrent head bring more than chosen ones: acceptance, and no times.

Both ways answer the same prompts by the same noise, at several temperatures and sizes. Standard errors are over
prompts, those of differences paired by prompt. Other texts than the shipped prompts are files of JSON lines with a
field `text`, `prompt` or `turns`, given as NAME=FILE. Writes one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from truedraft import Engine, SamplingParams, load_model
from truedraft.drafters import Redrafter
from truedraft.embedded import embedded_heads, heldout_prompts_file
from truedraft.models.base import LanguageModel

TEMPERATURES = (0.3, 0.5, 0.7, 0.8, 1.0)
SIZES = ((8, 4, 16), (4, 5, 16))
"""Beams, their length, and nodes; the second are those that are drafted where nobody chose."""
_PROMPT_CHARACTERS = 1200


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", type=Path, help="without it the embedded one")
    parser.add_argument("--texts", action="append", default=[], metavar="NAME=FILE", help="further prompts; repeatable")
    parser.add_argument("--limit", type=int, default=32, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/drawn_beams.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    texts = {"held-out code": prompts_of(heldout_prompts_file(), options.limit)}
    for each in options.texts:
        name, _, file = each.partition("=")
        texts[name] = prompts_of(Path(file), options.limit)
    target = load_model("embedded:target")
    head = options.head or embedded_heads("redrafter")
    rows = []
    for name, prompts in texts.items():
        for temperature in TEMPERATURES:
            for sizes in SIZES:
                row = {"texts": name, "prompts": len(prompts), "tokens": options.tokens, "temperature": temperature}
                rows.append(row | compared(target, head, sizes, prompts, temperature, options.tokens))
                print(json.dumps(rows[-1]), flush=True)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts_of(file: Path, limit: int) -> list[str]:
    """The first prompts of a file."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines()[:limit]:
        row = json.loads(line)
        text = row.get("text") or row.get("prompt") or row["turns"]
        found.append((text if isinstance(text, str) else text[0])[:_PROMPT_CHARACTERS])
    return found


def compared(
    target: LanguageModel,
    head: Path,
    sizes: tuple[int, int, int],
    prompts: Sequence[str],
    temperature: float,
    tokens: int,
) -> dict[str, Any]:
    """Tokens per target call of chosen and of drawn beams, and their difference."""
    beams, length, nodes = sizes
    counts = {}
    for sampled in (False, True):
        drafter = Redrafter.load(head, beams=beams, length=length, nodes=nodes, sampled=sampled)
        engine = Engine(target, drafter, max_batch=16, controller="fixed", entropy=0)
        params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
        answers = engine.generate(list(prompts), params)
        counts[sampled] = [(each.stats.emitted_tokens, each.stats.target_calls) for each in answers]
    chosen, drawn = (sum(e for e, _ in counts[way]) / sum(c for _, c in counts[way]) for way in (False, True))
    differences = [
        after[0] / after[1] - before[0] / before[1] for before, after in zip(counts[False], counts[True], strict=True)
    ]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else None
    return {
        "beams": beams,
        "length": length,
        "nodes": nodes,
        "chosen": chosen,
        "drawn": drawn,
        "drawn_more": statistics.fmean(differences),
        "error": error,
    }


if __name__ == "__main__":
    main()
