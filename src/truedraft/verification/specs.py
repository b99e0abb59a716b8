"""Rules by name: the one place where words become rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from truedraft.errors import OptionError, UnknownOptionError, errors_about
from truedraft.options import Words, read_number
from truedraft.verification.block import BlockVerification
from truedraft.verification.lossy import LenientSampling, TypicalAcceptance
from truedraft.verification.rule import Rule
from truedraft.verification.speculative import SpeculativeSampling

Options = Mapping[str, float]


def rule_from_spec(spec: str) -> Rule:
    """Make a rule from its words, as `--rule` takes them.

    `speculative` and `block` are lossless; `speculative,lenience=L` is lossy for L below 1, and so is
    `typical[,epsilon=0.09][,delta=0.3]`.

    Raises:
        UnknownOptionError: there is no such rule, or it has no such option; names the nearest valid one.
        OptionError: an unusable value.
    """
    with errors_about("rule"):
        words = Words.parse("rule", spec)
        if words.kind not in _MAKERS:
            raise UnknownOptionError.nearest("rule", words.kind, _MAKERS)
        make, known = _MAKERS[words.kind]
        words.check(known)
        return make({name: read_number(name, value) for name, value in words.options.items()})


def _speculative(options: Options) -> Rule:
    lenience = options.get("lenience", 1.0)
    return SpeculativeSampling() if lenience == 1.0 else LenientSampling(lenience)


def _block(options: Options) -> Rule:
    if "lenience" in options:
        raise OptionError(
            f"rule {BlockVerification.name!r} is lossless and has no lenience; "
            f"take {SpeculativeSampling.name},lenience={options['lenience']:g}"
        )
    return BlockVerification()


def _typical(options: Options) -> Rule:
    return TypicalAcceptance(**options)


_MAKERS: dict[str, tuple[Callable[[Options], Rule], tuple[str, ...]]] = {
    SpeculativeSampling.name: (_speculative, ("lenience",)),
    # The option is known so that it is refused with the rule that has it.
    BlockVerification.name: (_block, ("lenience",)),
    TypicalAcceptance.name: (_typical, ("epsilon", "delta")),
}
