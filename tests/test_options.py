"""Words that name parts, numbers as they are typed, and errors that know what they are about."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest

from truedraft.errors import ChangedOptionsError, OptionError, UnknownOptionError, errors_about
from truedraft.options import Words, called, check_whole, read_bytes, read_number, read_whole, record_of


def test_words() -> None:
    words = Words.parse("drafter", 'draft:"a,b/c=d", branching = "2-2" ,nodes=3')
    assert (words.kind, words.path, dict(words.options)) == ("draft", "a,b/c=d", {"branching": "2-2", "nodes": "3"})
    assert Words.parse("rule", " block ").kind == "block" and Words.parse("drafter", "draft:").path is None


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("x,nodes", "rule 'x,nodes': 'nodes' is not of the form option=value"),
        ("x,", "rule 'x,': '' is not of the form option=value"),
        ("x,a=1,a=2", "rule 'x,a=1,a=2' has a twice; give it once"),
        ('x,"a', "rule 'x,\"a' has a double quote without its second"),
        ('x("a;b)', "rule 'x(\"a;b)' has a double quote without its second"),
        ("x(a;(b)", "rule 'x(a;(b)' has a parenthesis without its second"),
        ("x(a;;b)", "rule 'x(a;;b)' has an empty member; write as many as there are, as in (A;B)"),
        ("x()", "rule 'x()' has an empty member; write as many as there are, as in (A;B)"),
        ("x(a) b,c=1", "rule 'x(a) b,c=1': its members are followed by 'b'; write ,option=value"),
        ("x(a),c", "rule 'x(a),c': 'c' is not of the form option=value"),
    ],
)
def test_words_that_cannot_be_read(typed: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        Words.parse("rule", typed)
    assert str(refused.value) == message


def test_words_of_what_others_make_up() -> None:
    words = Words.parse("drafter", ' many( draft:"x;y)",n=2; few(a;b(c));own:A,sizes="(1, 2)" ),depth=3')
    assert (words.kind, words.path, dict(words.options)) == ("many", None, {"depth": "3"})
    assert words.members == ['draft:"x;y)",n=2', "few(a;b(c))", 'own:A,sizes="(1, 2)"']
    assert Words.parse("drafter", words.members[0]).path == "x;y)", "its quotes are its own"
    assert Words.parse("drafter", words.members[1]).members == ["a", "b(c)"]
    assert Words.parse("drafter", "one(a)").members == ["a"]
    assert Words.parse("drafter", "draft:some/folder (2)").path == "some/folder (2)", "no member without a kind before"
    words.check(("depth",), takes_members=True)
    with pytest.raises(OptionError, match=r"drafter 'one' has no members, got \(a\)"):
        Words.parse("drafter", "one(a)").check(())
    with pytest.raises(OptionError, match=r"drafter 'one' needs members in parentheses: one\(A;B\)"):
        Words.parse("drafter", "one").check((), takes_members=True)


def test_what_a_kind_does_not_take() -> None:
    words = Words.parse("rule", "x:path,lenient=1")
    with pytest.raises(UnknownOptionError, match="unknown option of rule 'x' 'lenient'; did you mean 'lenience'"):
        words.check(("lenience",))
    with pytest.raises(OptionError, match="rule 'x' takes no path, got 'path'"):
        words.check(("lenient",))
    words.check(("lenient",), takes_path=True)


def test_numbers() -> None:
    assert (read_whole("n", "7"), read_number("n", "0.5"), check_whole("n", np.int64(3), 3)) == (7, 0.5, 3)
    for wrong in (True, 2.0, "3", 2):
        with pytest.raises(OptionError, match=r"n must be a whole number of 3 or more, got"):
            check_whole("n", wrong, 3)
    with pytest.raises(OptionError, match="n must be a number, got 'x'"):
        read_number("n", "x")


def test_an_error_calls_its_field_as_the_reader_does() -> None:
    error = OptionError("must be 1 or more, got 0", field="max_tokens")
    assert str(error) == "max_tokens must be 1 or more, got 0" == str(pickle.loads(pickle.dumps(error)))
    error.call_fields({"max_tokens": "--max-tokens"})
    assert str(error) == "--max-tokens must be 1 or more, got 0" and error.field == "max_tokens"


def test_errors_from_inside_are_about_what_is_being_read() -> None:
    for message, field in (("nothing fits", None), ("must be 1", "nodes")):
        with pytest.raises(OptionError) as refused, errors_about("drafter"):
            raise OptionError(message, field=field)
        assert refused.value.field == (field or "drafter")
    assert UnknownOptionError.nearest("rule", "x", ["y"]).field == "rule"
    assert UnknownOptionError.nearest("option of rule 'x'", "x", ["y"]).field is None


def test_changes_are_named() -> None:
    error = ChangedOptionsError("the run", {"width": (1, 2), "steps": (None, 3)})
    error.call_fields({"width": "--width"})
    assert str(error).startswith("the run was begun with another configuration (--width was 1 and is now 2; steps was")


def test_sizes_are_in_powers_of_1024() -> None:
    meant = {"1000": 1000, "512K": 512 << 10, "300m": 300 << 20, "1.5G": 3 << 29, "2GiB": 2 << 30}
    assert {typed: read_bytes("size", typed) for typed in meant} == meant
    for typed in ("", "much", "-1", "1X", "1e9", "M"):
        with pytest.raises(OptionError, match=f"^size must be a size as 1000000, 300M or 1.5G, got {typed!r}$"):
            read_bytes("size", typed)


def test_an_annotation_for_type_checkers_alone_leaves_the_others() -> None:
    def made(count: int, target: KnownToTypeCheckers) -> object:  # type: ignore[name-defined]  # noqa: F821
        return count, target

    assert called(made, {"count": "3"}, {"target": "it"}) == (3, "it")
    with pytest.raises(OptionError, match="'three'"):
        called(made, {"count": "three"}, {"target": "it"})


def test_a_record_has_fields_or_what_is_named() -> None:
    """Dataclasses within are objects, of their own making where they have one; tuples are lists."""

    @dataclasses.dataclass
    class Inner:
        values: tuple[int, ...] = (1, 2)

        def as_dict(self) -> dict[str, int]:
            return {"count": len(self.values)}

    @dataclasses.dataclass
    class Outer:
        inner: Inner
        by_name: dict[str, tuple[float, ...]]

        @property
        def size(self) -> int:
            return len(self.by_name)

    value = Outer(Inner(), {"a": (0.5,)})
    assert record_of(value) == {"inner": {"count": 2}, "by_name": {"a": [0.5]}}
    assert record_of(value, "size", "inner") == {"size": 1, "inner": {"count": 2}}
    assert record_of(value.inner) == {"values": [1, 2]}
