"""A GGUF file's weights in other types, by llama.cpp's own quantiser; runs in llama.cpp's environment.

    .venv-llamacpp/bin/python benchmarks/peers_quantise.py FILE FOLDER TYPE...

TYPE is a word of llama.cpp, such as Q5_1, Q4_K_S or BF16. Embeddings get it, too (`pure`); matrices whose rows are no
multiple of its block get the type that llama.cpp puts in its place.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import llama_cpp


def main() -> None:
    file, folder, *types = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in types:
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
        settings.allow_requantize, settings.pure = True, True
        settings.nthread = len(os.sched_getaffinity(0))
        out = Path(folder) / f"{Path(file).name.rsplit('.', 2)[0]}.{name}.gguf"
        if llama_cpp.llama_model_quantize(file.encode(), str(out).encode(), settings):
            raise SystemExit(f"llama.cpp made no {out}")


if __name__ == "__main__":
    main()
