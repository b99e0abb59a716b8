"""The tokenizer of a model for training, and its ordinary Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

from truedraft.errors import ModelError
from truedraft.models.loading import load_config, resolve_source
from truedraft.text.tokenizer import Tokenizer as ModelTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of an embedded name, a folder or a hub name; no remote code is run.

    Where it has no end-of-text token, it gets the configuration's. Raises ModelNotFoundError for an unknown name,
    ModelError without a tokenizer that can be used for training.
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
    """Write a model's tokenizer into a folder, without what training added; ModelError if there is none."""
    save_tokenizer(cast("PreTrainedTokenizerBase", _load(source)[1].backend), folder)


def _load(folder: str | Path) -> tuple[str, ModelTokenizer]:
    name = str(folder)
    source = name if Path(name).is_dir() else resolve_source(name)
    found = ModelTokenizer.load(source)
    if found is None:
        raise ModelError(f"the model {name!r} has no tokenizer, and training on text needs one")
    return source, found


def _eos_of_config(source: str, tokenizer: ModelTokenizer) -> str | None:
    """The end-of-text token in the model's configuration, the first where there are several; or None."""
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
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release and runtime supports
        config.write_text(json.dumps(settings, indent=2) + "\n")
