"""Drafters that a user wrote, by the name of their class: `MODULE:CLASS[,option=value]...`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from truedraft.core.budget import Budget
from truedraft.drafters.base import Drafter
from truedraft.errors import OptionError, TruedraftError, UnknownOptionError
from truedraft.models.base import LanguageModel
from truedraft.options import called, imported_module


def own_drafter(module: str, name: str | None, options: Mapping[str, str], target: LanguageModel) -> Drafter | None:
    """Make a drafter of a class in a module, which may be in the working directory.

    Options are passed to its constructor by name, parsed by their annotations (whole number, number, boolean, whole
    numbers or text), otherwise as Python literals. A parameter called `target` receives the target.

    Returns:
        The drafter; None if there is no such module.

    Raises:
        UnknownOptionError: the constructor has no such option.
        OptionError: the module cannot be imported, has no such drafter, or its constructor failed.
    """
    if name is None or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return None
    found = imported_module(module, "of a drafter")
    if found is None:
        return None
    spec = f"{module}:{name}"
    made = getattr(found, name, None)
    if not isinstance(made, type) or not issubclass(made, Drafter):
        what = "has no such name" if made is None else f"has {name} as a {type(made).__name__}"
        raise OptionError(f"drafter {spec!r}: the module {what}; name a class that extends truedraft.drafters.Drafter")
    _check_options(made, spec, options)
    try:
        drafter = called(made, options, {"target": target})
    except TruedraftError:
        raise
    except Exception as error:
        raise OptionError(f"drafter {spec!r} cannot be made ({type(error).__name__}: {error})") from error
    if not isinstance(getattr(drafter, "name", None), str) or not isinstance(getattr(drafter, "limits", None), Budget):
        raise OptionError(f"drafter {spec!r} needs a name (a text) and limits (a Budget); see docs/adding_a_drafter.md")
    return drafter


def _check_options(made: type[Drafter], spec: str, options: Mapping[str, str]) -> None:
    parameters = inspect.signature(made).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    known = [name for name in parameters if name != "target"]
    for name in options:
        if name not in known:
            raise UnknownOptionError.nearest(f"option of drafter {spec!r}", name, known or ["(none)"])
