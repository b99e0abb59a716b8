"""Exports of drafters: folders that vLLM, SGLang, llama.cpp and `speculators` load, and commands that serve them.

The export formats follow vLLM 0.32, SGLang's pages on speculative decoding and its models
of November 2026, and the llama.cpp in llama-cpp-python 0.3.36 (docs/speculative.md, conversion/).
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from truedraft.drafters.heads.head import Head
from truedraft.drafters.kinds import KINDS, dotted, kind_in
from truedraft.drafters.registry import ENGINES, TrainedDrafter
from truedraft.errors import ModelError, ModelNotFoundError, OptionError, UnknownOptionError, errors_about
from truedraft.files import SMOLLM2, user_path
from truedraft.models import gguf
from truedraft.models.embedded import SMOLLM2_ON_THE_HUB, smollm2_file
from truedraft.models.export import export_model, new_folder
from truedraft.models.gguf_header import parts_of
from truedraft.models.loading import load_config, read_model, resolve_source
from truedraft.options import Words, read_whole

_TOKENS = "num_speculative_tokens"
_DRAFT, _DRAFT_TOKENS = "draft", 4
_GGUF = "draft.gguf"


@dataclass(frozen=True, slots=True)
class ExportedDrafter:
    """A written drafter, and the length of its chains.

    `commands` are shell lines in order; the last one serves. Empty if the engine serves nothing.
    """

    kind: str
    engine: str
    target: str
    tokens: int
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The target of an exported drafter; `config` is None if it is not available here."""

    name: str
    config: Any

    @property
    def family(self) -> str:
        family, *_ = getattr(self.config, "architectures", None) or [""]
        return str(family)

    @property
    def layers(self) -> int:
        """Number of layers; raises `OptionError` if it cannot be read here."""
        if self.config is None:
            raise OptionError(f"{self.name!r} cannot be read here, and its layers are counted; name it", field="model")
        return int(self.config.get_text_config().num_hidden_layers)

    def check_fits(self, head: Any) -> None:
        if self.config is None:
            return
        text, sizes, wrong = self.config.get_text_config(), head.config, None
        last = max(sizes.layers, default=-1) if head.reads_layers else -1
        if sizes.width not in (text.hidden_size, getattr(text, "word_embed_proj_dim", None)):
            wrong = f"whose vectors have {text.hidden_size} entries, and this head reads {sizes.width}"
        elif last >= text.num_hidden_layers:
            wrong = f"which has {text.num_hidden_layers} layers, and this head reads layer {last}"
        elif sizes.vocab_size < text.vocab_size:
            wrong = f"which has {text.vocab_size:,} ids, and this head has {sizes.vocab_size:,}"
        if wrong is not None:
            raise OptionError(f"is {self.name!r}, {wrong}; name the target that it was trained for", field="model")

    def lm_head(self, head: Head) -> Tensor | None:
        """The LM head weight `[vocab, width]`; None if the target is not available."""
        if self.config is None:
            return None
        model = read_model(resolve_source(self.name), self.name, next(head.parameters()).dtype)
        weight: Tensor = model.get_output_embeddings().weight.detach()
        return weight


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine loads a kind of drafter.

    Attributes:
        words: of the server's command: DIR is the folder, FILE the GGUF file in it, K the number of tokens. For vLLM:
            its method, and further configuration keys.
        write: called with the head, a folder and the target; None for draft models.
        reads: required sizes of heads; the engine ignores others, some without an error.
        flags: those of these sizes with an option of `truedraft train`.
    """

    words: str
    write: Callable[[Any, Path, ExportTarget], None] | None = None
    reads: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    otherwise: str = ""

    def typed(self, folder: Path, tokens: int) -> list[str]:
        if not self.words.startswith("-"):
            method, *more = self.words.split()
            about = {"method": method, "model": str(folder), _TOKENS: tokens, **dict.fromkeys(more, True)}
            return ["--speculative-config", json.dumps(about)]
        given = {"DIR": str(folder), "FILE": str(folder / _GGUF), "K": str(tokens), "K+1": str(tokens + 1)}
        return [given.get(word, word) for word in self.words.split()]


@dataclass(frozen=True, slots=True)
class Exports:
    """How engines load a kind of drafter.

    Attributes:
        instead: the nearest alternative for other engines, by engine; "" for all.
        export: called with path, engine, way, folder, target name and number of tokens; None for heads.
    """

    ways: Mapping[str, Way]
    instead: Mapping[str, str] = field(default_factory=dict)
    export: Callable[[str | None, str, Way, Path, str | None, int | None], ExportedDrafter] | None = None


SGLANG = "--speculative-algorithm {} --speculative-draft-model-path DIR "
SGLANG_STEPS = SGLANG + "--speculative-num-steps K --speculative-eagle-topk 1 --speculative-num-draft-tokens K+1"
LLAMACPP = "-md FILE --spec-type {} --spec-draft-n-max K"
_DRAFTS = Exports(
    {
        "vllm": Way("draft_model"),
        "sglang": Way(SGLANG_STEPS.format("STANDALONE")),
        "llamacpp": Way(LLAMACPP.format("draft-simple")),
    }
)
_SERVE = {
    "vllm": ["vllm", "serve"],
    "sglang": ["python", "-m", "sglang.launch_server", "--model-path"],
    "llamacpp": ["llama-server", "-m"],
}
_LOOKUP = {
    "vllm": """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'""",
    "sglang": "--speculative-algorithm NGRAM",
    "llamacpp": "--spec-type ngram-simple",
}
_NEAREST = {
    **dict.fromkeys(("self", "reencoded"), "train a draft model in its place: truedraft train draft"),
    **dict.fromkeys(("cascade", "portfolio", "auto"), "it runs one drafter; export one of the members by itself"),
}


def export_drafter(
    drafter: str, engine: str, folder: Path, model: str | None = None, *, dtype: str = "auto"
) -> ExportedDrafter:
    """Write a drafter, trained here or read from another project's folder, for another engine.

    Args:
        drafter: as `--drafter` takes it, with a path, or only the path; its one option is `num_speculative_tokens`.
        folder: must not exist, or be empty.
        model: the target, as `load_model` takes it; None is the one that the drafter names.
        dtype: of a draft model's weights, as `load_model` takes it; heads keep theirs.

    Raises:
        UnknownOptionError: there is no such engine.
        OptionError: the engine does not run such a drafter; or an invalid folder or target.
        ModelError: the drafter or the target cannot be read, or the engine does not support a part of it.
    """
    if engine not in ENGINES:
        raise UnknownOptionError.nearest("engine", engine, ENGINES)
    with errors_about("drafter"):
        kind, words = _kind_of(Words.parse("drafter", drafter))
        exports = _exports_of(kind)
        way = exports.ways.get(engine)
        if way is None:
            raise OptionError(f"{engine} runs no {kind} drafters{_nearest(kind, engine, exports)}")
        for name in words.options.keys() - {_TOKENS}:
            raise OptionError(
                f"{name} is of trees and rules that {engine} does not have; leave it out: it drafts chains of {_TOKENS}"
            )
        requested = words.options.get(_TOKENS)
        tokens = None if requested is None else read_whole(_TOKENS, requested)
        if exports.export is not None:
            return exports.export(words.path, engine, way, folder, model, tokens)
        if words.path is None:
            raise OptionError(f"{kind!r} does not say which one; give its folder: {kind}:DIR")
        head = None if way.write is None else dotted(KINDS[kind].head).load(words.path)
    if head is None:
        return _export_draft(words.path, engine, way, folder, model, tokens, dtype)
    return _export_head(head, engine, way, folder, model, tokens)


def _exports_of(kind: str) -> Exports:
    if kind == _DRAFT:
        return _DRAFTS
    exports: Exports = dotted(KINDS[kind].exports) if kind in KINDS and KINDS[kind].exports else Exports({})
    return exports


def _nearest(kind: str, engine: str, exports: Exports) -> str:
    if engine in exports.instead:
        return exports.instead[engine]
    nearest = exports.instead.get("") or _NEAREST.get(kind)
    if engine not in _LOOKUP and nearest is None:
        return "; it trains heads on the target's vectors, which `truedraft train --help` lists"
    return f"; {nearest or 'it looks n-grams up by itself: ' + _LOOKUP[engine]}"


def _kind_of(words: Words) -> tuple[str, Words]:
    if words.kind in (*KINDS, "auto", "portfolio"):
        return words.kind, words
    typed = words.kind if words.path is None else f"{words.kind}:{words.path}"
    path = user_path(typed, ModelNotFoundError)
    if not path.exists():
        raise ModelNotFoundError(f"there is no folder {typed!r}, and no drafter of that name; check the path")
    known = TrainedDrafter.read(path)
    return (kind_in(path) or _DRAFT) if known is None else known.kind, replace(words, path=typed)


def _export_head(
    head: Any, engine: str, way: Way, folder: Path, model: str | None, tokens: int | None
) -> ExportedDrafter:
    target = target_of(model, head.record.target_name, engine)
    target.check_fits(head)
    count = chain_of(tokens, head.reach, head.reach)
    if head.reads_layers:
        head = head.reading(target.layers)
    unread = [name for name, value in way.reads.items() if getattr(head.config, name) != value]
    if unread:
        flags = unread if set(unread) <= set(way.flags) else []
        without = "".join(f" --no-{name.replace('_', '-')}" for name in flags)
        raise OptionError(
            f"{engine} reads {head.kind} heads with "
            + ", ".join(f"{name} {way.reads[name]}, not {getattr(head.config, name)}" for name in unread)
            + f"; {way.otherwise}"
            + (f"; {engine} would read one made by truedraft train {head.kind}{without}" if without else "")
        )
    assert way.write is not None
    with new_folder(folder):
        way.write(head, folder, target)
    return exported(folder, head.kind, engine, target, count, way)


def _export_draft(
    name: str, engine: str, way: Way, folder: Path, model: str | None, tokens: int | None, dtype: str
) -> ExportedDrafter:
    known = TrainedDrafter.read(user_path(name, ModelNotFoundError))
    target = target_of(model, "" if known is None else known.target_name, engine)
    count = chain_of(tokens, _DRAFT_TOKENS, None)
    configs = (load_config(resolve_source(name), name, None), target.config)
    own, theirs = (None if each is None else each.get_text_config().vocab_size for each in configs)
    if engine != "llamacpp" and theirs not in (None, own):
        raise OptionError(
            f"{engine} wants a draft with the target's vocabulary: {name!r} has {own:,} ids, and {target.name!r} "
            f"{theirs:,}; train one for it: truedraft train draft"
        )
    file = _gguf_file(name)
    if engine == "llamacpp" and file is not None and len(parts_of(file)) == 1:
        with new_folder(folder):
            shutil.copyfile(file, folder / _GGUF)
    else:
        export_model(name, folder, dtype=dtype)
    return exported(folder, _DRAFT, engine, target, count, way)


def target_of(model: str | None, named: str, engine: str) -> ExportTarget:
    """The named target, or the drafter's; raises `OptionError` if there is no name, or the engine cannot load it."""
    name = named if model is None else model
    if not name:
        raise OptionError("this drafter does not say what its target is; name it", field="model")
    if engine == "llamacpp" and name.startswith("embedded:"):
        raise OptionError(
            f"llama.cpp's convert_hf_to_gguf.py does not know the tokenizer of {name!r}; take a published model, or "
            "--for vllm",
            field="model",
        )
    config = None
    with contextlib.nullcontext() if model else contextlib.suppress(ModelError):  # it may have moved
        config = load_config(resolve_source(name), name, None)
    return ExportTarget(name, config)


def chain_of(tokens: int | None, usual: int, most: int | None) -> int:
    """Length of a chain, or the default; raises `OptionError` if it is less than 1, or more than `most`."""
    count = usual if tokens is None else tokens
    if count < 1 or (most is not None and count > most):
        raise OptionError(f"{_TOKENS} must be 1 to {most or 'as many as pay'}, got {count}", field="drafter")
    return count


def exported(folder: Path, kind: str, engine: str, target: ExportTarget, tokens: int, way: Way) -> ExportedDrafter:
    """The result, with the shell commands for the engine."""
    if engine not in _SERVE:
        return ExportedDrafter(kind, engine, target.name, tokens, ())
    target_folder, file = f"{folder}-target", _gguf_file(target.name)
    stock = file is None and not target.name.startswith("embedded:")
    named = SMOLLM2_ON_THE_HUB if target.name == SMOLLM2 else target.name
    place = named if stock else target_folder
    made = [] if stock else [["truedraft", "export", "--model", target.name, "--out", target_folder]]
    if engine == "llamacpp":
        convert, served = ["python", "convert_hf_to_gguf.py"], str(file or f"{target_folder}.gguf")
        tokenizer = [] if way.write is None else ["--target-model-dir", place]
        made = made if tokenizer or file is None else []
        made += [] if file else [[*convert, place, "--outfile", served]]
        ready = (folder / _GGUF).exists()
        made += [] if ready else [[*convert, str(folder), *tokenizer, "--outfile", str(folder / _GGUF)]]
        place = served
    lines = [*made, [*_SERVE[engine], place, *way.typed(folder, tokens)]]
    return ExportedDrafter(kind, engine, target.name, tokens, tuple(map(shlex.join, lines)))


def _gguf_file(name: str) -> Path | None:
    if name == SMOLLM2:
        return smollm2_file()
    path = user_path(name, ModelNotFoundError)
    files = gguf.models_in(path) if path.is_dir() and not (path / "config.json").is_file() else [path]
    return files[0] if len(files) == 1 and files[0].suffix == ".gguf" and files[0].is_file() else None
