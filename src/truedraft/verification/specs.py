"""Rules by name: the one place where words become rules."""

from __future__ import annotations

from collections.abc import Callable

from truedraft.errors import OptionError, UnknownOptionError
from truedraft.verification.rule import Rule
from truedraft.verification.speculative import SpeculativeSampling

_MAKERS: dict[str, Callable[[], Rule]] = {SpeculativeSampling.name: SpeculativeSampling}


def rule_from_spec(spec: str) -> Rule:
    """Make a rule from its word, as `--rule` takes it: `speculative`.

    Raises:
        UnknownOptionError: there is no such rule; names the nearest valid one.
        OptionError: an option that the rule does not have.
    """
    word, *options = (part.strip() for part in spec.split(","))
    if word not in _MAKERS:
        raise UnknownOptionError.nearest("rule", word, _MAKERS)
    if options:
        raise OptionError(f"rule {word!r} takes no options, got {','.join(options)!r}")
    return _MAKERS[word]()
