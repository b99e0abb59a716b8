"""What loading a GGUF file takes of time and memory, to the first token: each in a process of its own.

Imports are apart, and so is the tokenizer, which is loaded alone in another process. Kernels are compiled, and the
file's tokenizer is converted and kept, by a load that is not counted. Adds a line of JSON for each file.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import RESULTS, Lines

_STATUS = Path("/proc/self/status")
_WAYS = ("tokenizer", "model")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="GGUF files")
    parser.add_argument("--turns", type=int, default=3, help="loads of each, of which the medians are told")
    parser.add_argument("--out", type=Path, default=RESULTS / "loading_files.jsonl")
    parser.add_argument("--child", choices=_WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(loaded(options.files[0], options.child)))
        return
    lines = Lines(options.out)
    for file in options.files:
        apart(file, "model")
        turns = {way: [apart(file, way) for _ in range(options.turns)] for way in _WAYS}
        lines.add(summary(file, turns))
        print(json.dumps(lines.records[-1]))


def apart(file: Path, way: str) -> dict[str, float]:
    """What `loaded` says, in a process of its own."""
    words = [sys.executable, __file__, str(file), "--child", way]
    found: dict[str, float] = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    return found


def loaded(file: Path, way: str) -> dict[str, float]:
    """Seconds and bytes of this process, over those of its imports."""
    import transformers  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    from truedraft import Engine, SamplingParams, load_model
    from truedraft.models.backends.native import backend  # noqa: F401
    from truedraft.models.loading import resolve_source
    from truedraft.models.mapped import return_freed_memory
    from truedraft.text.tokenizer import Tokenizer

    imported, cpu_s, began = memory("VmRSS"), processor_s(), time.perf_counter()
    held: Any
    if way == "tokenizer":
        held = Tokenizer.load(resolve_source(str(file)))
        return_freed_memory()
    else:
        held = load_model(str(file))
        Engine(held).generate([1, 2, 3], SamplingParams(max_tokens=1))
    taken = {"seconds": time.perf_counter() - began, "cpu_s": processor_s() - cpu_s}
    found = {"imports_bytes": imported, "resident_bytes": memory("VmRSS") - imported, "peak_bytes": memory("VmHWM")}
    return taken | found | {"weight_bytes": getattr(held, "weight_bytes", 0)}


def memory(name: str) -> int:
    """Bytes of this process, by the name of Linux."""
    return next(int(line.split()[1]) << 10 for line in _STATUS.read_text().splitlines() if line.startswith(name))


def processor_s() -> float:
    """Seconds that this process had of all cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summary(file: Path, turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and memory over the file's size."""
    model, tokenizer = (
        {name: statistics.median(each[name] for each in turns[way]) for name in turns[way][0]}
        for way in ("model", "tokenizer")
    )
    size = file.stat().st_size
    peak = model["peak_bytes"] - model["imports_bytes"]
    return {
        "file": file.name,
        "file_bytes": size,
        "resident / file": model["resident_bytes"] / size,
        "without the tokenizer, resident / file": (model["resident_bytes"] - tokenizer["resident_bytes"]) / size,
        "peak / file": peak / size,
        "seconds to the first token": model["seconds"],
        "of a processor": model["cpu_s"],
        "tokenizer, of a processor": tokenizer["cpu_s"],
        "turns": turns,
    }


if __name__ == "__main__":
    main()
