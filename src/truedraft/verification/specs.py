"""Rules by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from truedraft.errors import OptionError, UnknownOptionError, errors_about
from truedraft.options import Words, read_number

if TYPE_CHECKING:
    from truedraft.verification.rule import Rule

Options = Mapping[str, float]


def rule_from_spec(spec: str) -> Rule:
    """Make a rule from its specification: `speculative[,lenience=L]`, `block`, `typical[,epsilon=0.09][,delta=0.3]`.

    `typical` is lossy, and so is a lenience below 1.

    Raises:
        UnknownOptionError: no such rule, or no such option of it; names the nearest valid one.
        OptionError: an unusable value.
    """
    with errors_about("rule"):
        words = rule_words(spec)
        make, _ = _MAKERS[words.kind]
        return make({name: read_number(name, value) for name, value in words.options.items()})


def rule_words(spec: str) -> Words:
    """Parse a rule's specification; `rule_from_spec` checks the values.

    Raises:
        OptionError: see `rule_from_spec`.
    """
    words = Words.parse("rule", spec)
    if words.kind not in _MAKERS:
        raise UnknownOptionError.nearest("rule", words.kind, _MAKERS)
    words.check(_MAKERS[words.kind][1])
    return words


def _speculative(options: Options) -> Rule:
    from truedraft.verification import LenientSampling, SpeculativeSampling

    lenience = options.get("lenience", 1.0)
    return SpeculativeSampling() if lenience == 1.0 else LenientSampling(lenience)


def _block(options: Options) -> Rule:
    if "lenience" in options:
        raise OptionError(
            f"rule 'block' is lossless and has no lenience; take speculative,lenience={options['lenience']:g}"
        )
    from truedraft.verification import BlockVerification

    return BlockVerification()


def _typical(options: Options) -> Rule:
    from truedraft.verification import TypicalAcceptance

    return TypicalAcceptance(**options)


_MAKERS: dict[str, tuple[Callable[[Options], Rule], tuple[str, ...]]] = {
    "speculative": (_speculative, ("lenience",)),
    # Listed so that the error names the rule with this option.
    "block": (_block, ("lenience",)),
    "typical": (_typical, ("epsilon", "delta")),
}
