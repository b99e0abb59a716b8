"""A model's folder as a GGUF file, by llama.cpp's own script; runs in llama.cpp's environment.

    .venv-llamacpp/bin/python benchmarks/peers_gguf.py LLAMA_CPP FOLDER OUT

The script knows tokenizers by what they make of a test text, and refuses others. How text is split matters nothing
where prompts are ids, so one that it knows is named in its place.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

PRETOKENIZER = "llama-bpe"


def main() -> None:
    source, folder, out = (Path(word).resolve() for word in sys.argv[1:])
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion import base  # lies beside the script

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: PRETOKENIZER
    script = source / "convert_hf_to_gguf.py"
    sys.argv = [str(script), str(folder), "--outtype", "bf16", "--outfile", str(out)]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
