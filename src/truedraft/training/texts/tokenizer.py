"""Train a byte-level BPE tokenizer and save it as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from truedraft.errors import ModelError
from truedraft.models.loading import load_config, resolve_source
from truedraft.text.tokenizer import Tokenizer as ModelTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"

# How text is cut before merging. A line break keeps the indentation after it, since in source code the two
# are decided together; a word keeps one sign before it (`.append`, `(self`); numbers come in threes.
CODE_PATTERN = (
    r"(?:[^\S\n]*\n)+[^\S\n]*"  # line breaks, blank lines, and the indentation that follows
    r"|[^\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|[^\S\n]+(?=\S)|[^\S\n]+"
)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, context: int, pattern: str = CODE_PATTERN
) -> PreTrainedTokenizerFast:
    """Learn byte-level BPE merges from the texts.

    Every string survives encoding and decoding unchanged: no normalisation, no prefix space, all 256 bytes in
    the alphabet. Id 0 is `<|endoftext|>`, which separates documents and ends an answer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of an embedded name, a folder (with or without a model) or a hub name; no remote code is run.

    Where it names no end-of-text token, it is given the one of the model's configuration.

    Raises:
        ModelNotFoundError: no such folder or name.
        ModelError: the model comes without a tokenizer, or with one that cannot be used for training.
    """
    source, found = _load(folder)
    if found.backend.eos_token_id is None:
        found.backend.eos_token = _eos_of_config(source, found)
    if found.backend.eos_token_id is None:
        raise ModelError(
            f"neither the tokenizer nor the configuration of {str(folder)!r} names an end-of-text token, which "
            'separates the texts in training: add "eos_token" to its tokenizer_config.json'
        )
    return cast("PreTrainedTokenizerBase", found.backend)


def copy_tokenizer(source: str | Path, folder: Path) -> None:
    """Write the tokenizer of a model into a folder as it is, whatever training was told of it besides.

    Raises:
        ModelError: there is none.
    """
    save_tokenizer(cast("PreTrainedTokenizerBase", _load(source)[1].backend), folder)


def _load(folder: str | Path) -> tuple[str, ModelTokenizer]:
    """Where a tokenizer lies, and the tokenizer."""
    name = str(folder)
    source = name if Path(name).is_dir() else resolve_source(name)
    found = ModelTokenizer.load(source)
    if found is None:
        raise ModelError(f"the model {name!r} has no tokenizer, and training on text needs one")
    return source, found


def _eos_of_config(source: str, tokenizer: ModelTokenizer) -> str | None:
    """The token that the model's configuration ends a text with, the first where it names several; or None."""
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        return None
    given = load_config(source, source, None).get_text_config().eos_token_id
    first = given[0] if isinstance(given, list) and given else given
    if not isinstance(first, int) or not 0 <= first < tokenizer.vocab_size:
        return None
    return cast("str | None", tokenizer.backend.convert_ids_to_tokens(first))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release and runtime knows
        config.write_text(json.dumps(settings, indent=2) + "\n")
