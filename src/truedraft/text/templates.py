"""Chat templates as untrusted programs, with limits on steps and characters, which transformers' sandbox lacks.

Each loop iteration, macro and call counts, and so does what filters, methods and operators read and write; an operation
that would exceed the limit is refused beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from contextvars import ContextVar
from functools import lru_cache, wraps
from types import FunctionType
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

MOST_STEPS = 10_000_000  # nodes of a template, entries of lists, and hundreds of characters, plus 10 for each count
MOST_CHARACTERS = 1 << 27  # of all texts that a template makes
_MOST_AT_ONCE = 1 << 24
_MOST_BITS = 1 << 17  # of an integer
_MOST_SOURCE = 1 << 21  # characters of a template
_SPENT: ContextVar[list[int] | None] = ContextVar("spent", default=None)
_STEP, _MADE, _READ, _CUT, _JOINED, _PASSED = "~step", "~made", "~read", "~cut", "~joined", "~passed"
# Filters that iterate over a list without reading inside its entries (others read everything inside), that compare
# entries and write no text, and that process each character in Python, or by many expressions; tests that compare.
_OF_ENTRIES = {
    *("length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr"),
    *("batch", "slice", "reverse", "items", "sum", "random", "attr", "default", "d"),
}
_ORDERING = ("sort", "dictsort", "unique", "groupby", "min", "max")
_SLOW = ("urlize", "wordwrap", "pprint", "title", "wordcount", "urlencode", "striptags")
_COMPARING = frozenset(
    ["in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge"]
)
_HOLDING = (list, tuple, dict, set, frozenset, MappingView, Namespace)


class TooMuchError(TemplateError):
    """A template exceeds the limit of steps or characters."""


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **how: Any) -> Any:
    """The result of `apply_chat_template`; a `TemplateError` beyond the limits, or as transformers raises it."""
    stock = PreTrainedTokenizerBase.apply_chat_template
    if getattr(type(tokenizer), "apply_chat_template", None) is not stock:  # implemented in Python, like Mistral's
        return tokenizer.apply_chat_template(messages, **how)
    render = _with(chat_template_utils.render_jinja_template, _compile_jinja_template=_compiled)
    token = _SPENT.set([0, 0])
    try:
        return _with(stock, render_jinja_template=render)(tokenizer, messages, **how)
    finally:
        _SPENT.reset(token)


def _with(function: Any, **names: Any) -> Any:
    made = FunctionType(
        function.__code__, function.__globals__ | names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@lru_cache(maxsize=32)
def _compiled(source: str) -> Any:
    if len(source) > _MOST_SOURCE:
        raise TemplateError(f"it has {len(source)} characters, and may have {_MOST_SOURCE}")
    stock = chat_template_utils._compile_jinja_template("").environment
    bounded = _Bounded(
        trim_blocks=stock.trim_blocks,
        lstrip_blocks=stock.lstrip_blocks,
        extensions=[type(each) for each in stock.extensions.values()],
        finalize=_as_text,
    )
    bounded.globals.update({name: each for name, each in stock.globals.items() if name != "lipsum"})
    bounded.globals.pop("lipsum", None)
    bounded.filters.update({name: _counted(name, each) for name, each in stock.filters.items()})
    bounded.filters |= {name: _passing(count) for name, count in _PASSING.items()} | {_JOINED: _joined}
    bounded.tests.update({name: _compared(each) for name, each in stock.tests.items() if name in _COMPARING})
    return bounded.from_string(source)


def _spend(steps: int, characters: int = 0) -> None:
    if (spent := _SPENT.get()) is None:
        return
    spent[0] += 10 + steps + characters // 100
    spent[1] += characters
    if spent[1] > MOST_CHARACTERS or characters > _MOST_AT_ONCE:
        most = f"{MOST_CHARACTERS >> 20} million characters, or one of {_MOST_AT_ONCE >> 20}"
        raise TooMuchError(f"it makes texts of more than {most} million")
    if spent[0] > MOST_STEPS:
        raise TooMuchError(f"it takes more than {MOST_STEPS} steps to write them")


def _characters(value: Any) -> int:
    """Approximate length of a value as text; nested entries are visited and counted each time they occur."""
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, _HOLDING):
        return 24
    found, left = 0, [value]
    while left:
        each = left.pop()
        if isinstance(each, Namespace):
            each = each._Namespace__attrs
        inner: Any = (*each.keys(), *each.values()) if isinstance(each, dict) else each
        _spend(len(inner) + 20)
        for one in inner:
            if isinstance(one, _HOLDING):
                left.append(one)
            else:
                found += len(one) + 4 if isinstance(one, str | bytes) else 24
    return found


def _entries(value: Any) -> int:
    """Steps to iterate over a value once, without nested entries."""
    if isinstance(value, str | bytes):
        return 1 + len(value) // 100
    return 1 + len(value) if isinstance(value, list | tuple | dict | set | frozenset | range | MappingView) else 1


def _growth(name: str, value: Any, given: Sequence[Any]) -> int:
    """Most characters or entries that a filter, method or operator makes; 0 if little more than it reads."""
    whole = [abs(each) for each in given if type(each) is int]
    widest = max(whole, default=0)
    if name == "join":
        between, joined = (value, given[0] if given else ()) if isinstance(value, str) else (given[:1] or "", value)
        return _characters(joined) + _entries(joined) * _characters(between) if not callable(joined) else 0
    if name in ("tojson", "pprint"):
        return _characters(value) * (1 + widest)
    if name in ("batch", "slice", "to_bytes"):
        return widest
    if not isinstance(value, str | bytes):
        return 0
    if name in ("center", "ljust", "rjust", "zfill"):
        return len(value) + widest
    if name in ("indent", "expandtabs"):
        place = "\n" if name == "indent" else "\t"
        step = max([widest, *(len(each) for each in given if isinstance(each, str))], default=0)
        return len(value) + (1 + str(value).count(place)) * max(step, 8)
    if name == "replace" and len(given) > 1:
        old, new = given[0], given[1]
        return len(value) + str(value).count(str(old)) * _characters(new)
    if name in ("wordwrap", "translate"):
        return len(value) * (1 + max((_characters(each) for each in given if not isinstance(each, int)), default=0))
    if name in ("format", "format_map", "%"):
        text = str(value)
        digits = sum(int(each[:9]) for each in re.findall(r"\d{3,}", text))
        fields = text.count("{") + text.count("%") + text.count("*")
        return len(text) + digits + fields * (sum(map(_characters, given)) + sum(whole))
    return 0


def _check(name: str, value: Any, given: Iterable[Any]) -> None:
    most = _growth(name, value, [each[0] if type(each) is tuple and len(each) == 1 else each for each in given])
    if most > _MOST_AT_ONCE:
        raise TooMuchError(f"{name} would write {most} characters, and may write {_MOST_AT_ONCE}")


def _counted(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
    first = int(hasattr(inner, "jinja_pass_arg"))  # then a context comes before the value

    @wraps(inner)
    def counting(*given: Any, **named: Any) -> Any:
        value, rest = given[first] if len(given) > first else None, [*given[first + 1 :], *named.values()]
        if name in _OF_ENTRIES:
            _spend(_entries(value))
        elif name in _ORDERING:
            _spend(len(value) if isinstance(value, str) else _entries(value) + _characters(value) // 100)
        else:
            characters = _characters(value)
            _spend(4 * characters if name in _SLOW else 1, characters)
        if name in ("sum", "batch") and any(isinstance(each, list | tuple | dict) for each in rest):
            raise TemplateError(f"{name} of lists is not supported in chat templates")
        _check(name, value, rest)
        return _written(inner(*given, **named))

    return counting


def _compared(inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def counting(*given: Any) -> Any:
        for each in given:
            _spend(1 + _characters(each) // 100)
        return inner(*given)

    return counting


def _written(value: Any) -> Any:
    """Count a new value; an iterator, as of `map`, becomes a list, so that all of it is counted."""
    if isinstance(value, Iterator):
        entries = []
        for each in value:
            _spend(1)
            entries.append(each)
        return entries
    _spend(_entries(value), len(value) if isinstance(value, str | bytes) else 0)
    return value


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    _spend(1, _characters(value))
    return str(value)


def _passing(count: Callable[[Any], object]) -> Callable[[Context, Any], Any]:
    """A filter that counts a value and returns it; with a context, so that Jinja does not evaluate it beforehand."""

    @pass_context
    def passing(context: Context, value: Any) -> Any:
        count(value)
        return value

    return passing


@pass_context
def _joined(context: Context, parts: Sequence[Any]) -> str:
    texts = [*map(_as_text, parts)]
    _spend(len(texts), sum(map(len, texts)))
    return "".join(texts)


def _of_body(node: Any) -> Any:
    weight = 1 + sum(1 for each in node.body for _ in each.find_all(nodes.Node))
    node.body.insert(0, nodes.ExprStmt(_by(_STEP, nodes.Const(weight)), lineno=node.lineno))
    if getattr(node, "test", None) is not None:  # the condition of a loop; its body may never run
        node.test = _by(_PASSED, node.test)
    return node


def _of_literal(node: Any) -> Any:
    constant = all(isinstance(each, nodes.Const) for each in node.items)
    return node if constant or getattr(node, "ctx", "load") != "load" else _by(_MADE, node)


def _of_comparison(node: Any) -> Any:
    for each in (node, *node.ops):
        if not isinstance(each.expr, nodes.Const):
            each.expr = _by(_READ, each.expr)
    return node


def _of_slice(node: Any) -> Any:
    if isinstance(node.arg, nodes.Slice):
        node.node = _by(_CUT, node.node)
    return node


def _by(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno or 1)


_PASSING: Mapping[str, Callable[[Any], object]] = {
    _STEP: _spend,
    _MADE: _characters,
    _READ: lambda value: _spend(1 + _characters(value) // 100),
    _CUT: lambda value: _spend(_entries(value)),
    _PASSED: lambda _: _spend(2),
}
_COUNTED: Mapping[type[nodes.Node], Callable[[Any], Any]] = {
    **dict.fromkeys((nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock), _of_body),
    **dict.fromkeys((nodes.List, nodes.Tuple, nodes.Dict), _of_literal),
    nodes.Concat: lambda node: _by(_JOINED, nodes.List(node.nodes, lineno=node.lineno)),
    nodes.Compare: _of_comparison,
    nodes.Getitem: _of_slice,
}


class _Counting(NodeTransformer):
    def visit(self, node: nodes.Node, *given: Any, **named: Any) -> Any:
        made = self.generic_visit(node, *given, **named)
        way = _COUNTED.get(type(node))
        return made if way is None else way(made)


class _Bounded(ImmutableSandboxedEnvironment):
    """transformers' sandbox, in which templates count their steps."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, str | bytes):
                _check("%", left, right if isinstance(right, tuple) else [right])
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise TemplateError(f"{operator} would make a number of {bits} bits, and may make {_MOST_BITS}")
        elif operator == "*":
            times, many = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(times, int) and isinstance(many, str | bytes | list | tuple):
                size = _characters(many) if isinstance(many, list | tuple) else len(many)
                _spend(1, max(times, 0) * max(size, 1))
        elif isinstance(left, str | bytes) and isinstance(right, str | bytes):
            _spend(1, len(left) + len(right))
        return _written(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja has it
        _spend(60)  # a macro's frame takes much longer than a node
        own = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(own, str | bytes | int):
            _spend(_entries(own))
            _check(getattr(__obj, "__name__", ""), own, [*args, *kwargs.values()])
        made = super().call(__context, __obj, *args, **kwargs)
        if isinstance(made, dict):
            _characters(made)
        return _written(made)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        kept = []
        for part in parts:
            _spend(1, len(part))
            kept.append(part)
        return "".join(kept)
