"""Chat templates of strangers: what goes on without end or writes without end is refused before it does."""

from __future__ import annotations

import resource

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from truedraft.errors import PromptError
from truedraft.text import templates
from truedraft.text.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
A_MILLION = "{% set b = 'a' * 1000000 %}"
MANY = "[" + "b," * 300 + "]"
TABLE = "{" + ",".join(f"{n}: b" for n in range(300)) + "}"
GROWING = "{% set n = namespace(a=START) %}{% for i in range(60) %}{% set n.a = STEP %}{% endfor %}{{ n.a }}"


def growing(start: str, step: str) -> str:
    return GROWING.replace("START", start).replace("STEP", step)


@pytest.fixture
def tokenizer() -> Tokenizer:
    vocab = {chr(letter): letter - 32 for letter in range(32, 127)}
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE(vocab, []))), "tiny")


def refusal(tokenizer: Tokenizer, template: str) -> str:
    with pytest.raises(PromptError) as caught:
        tokenizer.chat_text(HELLO, template=template)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
        "{% macro f(n) %}{% if n < 60 %}{{ f(n+1) }}{{ f(n+1) }}{% endif %}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{% for x in [1, 1] %}{{ f(n-1) }}{% endfor %}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [[[[[[]]]]]] * 9 recursive %}{{ loop(x * 9) }}{% endfor %}",
        growing("[1]", "[n.a, n.a]"),
        growing("{}", "dict(a=n.a, b=n.a)"),
        growing("{}", "{'a': n.a, 'b': n.a}"),
        growing("[1]", "n.a + n.a"),
        growing("[[1]]", "n.a * 9"),
        A_MILLION + "{% set c = b ~ 'a' %}{% for i in range(99999) %}{% if b == c %}{% endif %}{% endfor %}",
        A_MILLION + "{% for i in range(99999) %}{% set c = b[1:] %}{% endfor %}",
        *(A_MILLION + "{{ " + MANY + f"|{each}|length" + " }}" for each in ("unique", "sort", "groupby(0)")),
        *(A_MILLION + "{{ b|" + each + " }}" for each in ("sort", "urlize", "wordwrap(3)", "title", "pprint")),
    ],
)
def test_steps_are_bounded(template: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_STEPS", 200_000)
    assert "it takes more than 200000 steps to write them" in refusal(tokenizer, template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a'.center(3000000000) }}",
        "{{ ['a']|map('center', 3000000000)|list }}",
        "{{ ([1] * 3000000000)|length }}",
        "{{ 'a'.ljust(3000000000) }}",
        "{{ 'a'.rjust(3000000000) }}",
        "{{ 'a'.zfill(3000000000) }}",
        "{{ '\t'.expandtabs(3000000000) }}",
        "{{ (1).to_bytes(3000000000, 'little') }}",
        "{{ 'a' * 3000000000 }}",
        "{{ 3000000000 * 'a' }}",
        "{{ '{:>3000000000}'.format(1) }}",
        "{{ '{:{}}'.format('a', 3000000000) }}",
        "{{ '%3000000000d' % 1 }}",
        "{{ '%*d' % (3000000000, 1) }}",
        "{{ '%3000000000d'|format(1) }}",
        A_MILLION + "{{ b.replace('a', b) }}",
        A_MILLION + "{{ b|replace('', b) }}",
        A_MILLION + "{{ ([b] * 1000)|join }}",
        A_MILLION + "{{ ['a', 'a', 'a'] * 99 }}{{ b.join(['a'] * 99) }}",
        A_MILLION + "{{ [b] * 99 }}",
        A_MILLION + "{{ ([b] * 99)|tojson }}",
        A_MILLION + "{% for i in range(999) %}{{ b }}{% endfor %}",
        A_MILLION + "{% set c %}{% for i in range(999) %}{{ b }}{% endfor %}{% endset %}{{ c|length }}",
        "{{ ('\n' * 1000000)|indent(1000000) }}",
        "{{ ('a ' * 100000)|wordwrap(1, wrapstring='b' * 10000) }}",
        "{{ ('a' * 10000).translate({97: 'b' * 10000}) }}",
        "{{ messages|tojson(indent=3000000000) }}",
        "{{ [1]|batch(3000000000, 0)|list }}",
        "{{ [1]|slice(3000000000)|list }}",
        *(
            A_MILLION + "{{ " + MANY + f"|{each}" + " }}"
            for each in ("select|join", "map('default')|join", "reverse|join", "batch(300)|join", "batch(300)|list")
        ),
        A_MILLION + "{{ ''.join(" + MANY + "|select) }}",
        A_MILLION + "{{ cycler(*" + MANY + ").items|select|join }}",
        *(
            A_MILLION + "{% set n = " + TABLE + " %}{{ " + each + " }}"
            for each in ("n.values()", "''.join(n.values())", "n.items()|string", "n|items|string", "'%s' % n.values()")
        ),
        *(A_MILLION + "{% set n = namespace(a=" + MANY + ") %}{{ " + each + " }}" for each in ("n", "n|string")),
        growing("'a'", "n.a ~ n.a"),
        growing("'a'", "n.a + n.a"),
        growing("'a'", "[n.a, n.a]|join"),
    ],
)
def test_what_is_written_is_bounded_before_it_is_made(template: str, tokenizer: Tokenizer) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = refusal(tokenizer, template)
    assert "characters" in said and ("would write" in said or "it makes texts of more than" in said)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB, where it would be gigabytes"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% set n = 9 ** 9 ** 9 %}{{ n ** n }}", "would make a number of"),
        ("{{ 1 // 0 }}", "division or modulo by zero"),
        ("{{ [[1]]|sum(start=[]) }}", "sum of lists is not supported"),
        ("{{ lipsum(n=1000000000) }}", "'lipsum' is undefined"),
        ("x" * 3_000_000, "it has 3000000 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", "nested too deeply"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_other_templates_that_cannot_run_are_told_in_a_sentence(template: str, said: str, tokenizer: Tokenizer) -> None:
    assert said in refusal(tokenizer, template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index0 ~ '/' ~ loop.length ~ m.role ~ ': ' ~ m.content|trim }}\n{% endfor %}",
        "{% for m in messages if m.role != 'user' %}{{ m['content'][0:1] + m.content[1:] }}{% else %}none{% endfor %}",
        "{% for k, v in messages[0]|items %}{{ (k, v) }}{{ [k, v] }}{{ {k: v} }}{% if k in ['role', v] %"
        "}!{% endif %}{% endfor %}",
        "{% macro f(x, y='-') %}<{{ x }}{{ y }}{{ caller() if caller }}>{% endmacro %}{% call f('a') %}b"
        "{% endcall %}{{ f(1, y=2) }}",
        "{% set ns = namespace(n=0, t='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.t "
        "= ns.t ~ m.role %}{% endfor %}{{ ns.n }}{{ ns.t }}",
        "{{ messages|tojson }}{{ messages|tojson(indent=2) }}{{ messages|map(attribute='role')|join(', '"
        ") }}{{ none }}{{ 1.5 }}",
        "{{ '%s-%05d' % ('a', 7) }}{{ '{}{:>4}'.format('b', 2) }}{{ 'a b'.split(' ')|length }}{{ 'x'.rep"
        "lace('x', 'yy') }}{{ 7 % 4 }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if loop.last %}{% b"
        "reak %}{% endif %}{% endfor %}",
        "{{ messages|map(attribute='role')|reverse|batch(1)|list }}{{ messages[0].items()|list|first }}"
        "{{ messages[0].values()|sort|unique|join }}{{ namespace(a=1) }}{{ messages[0].keys() }}",
        "{% filter upper %}{% set x %}abc{% endset %}{{ x }}{% endfilter %}{{ messages|selectattr('role'"
        ", 'eq', 'user')|list|length }}",
        "{%- for m in messages recursive %}{{ m.role or m }}{{ loop(['z']) if m.role }}{% endfor -%}",
    ],
)
def test_other_templates_write_what_transformers_writes(template: str, tokenizer: Tokenizer) -> None:
    expected = tokenizer.backend.apply_chat_template(HELLO, chat_template=template, tokenize=False)
    assert tokenizer.chat_text(HELLO, template=template) == expected
    ids = tokenizer.backend.apply_chat_template(HELLO, chat_template=template, return_dict=False)
    assert tokenizer.chat(HELLO, template=template) == ids


def test_a_long_conversation_is_far_from_the_bounds(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.co"
        "ntent is string %}{{ m.content|trim }}{% endif %}\n{% endfor %}"
    )
    monkeypatch.setattr(templates, "MOST_STEPS", templates.MOST_STEPS // 4)
    text = tokenizer.chat_text([HELLO[0], HELLO[1] | {"content": "word " * 100}] * 2000, template=template)
    assert text.count("word") == 200_000
