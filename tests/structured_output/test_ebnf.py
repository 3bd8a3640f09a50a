"""EBNF of llama.cpp and xgrammar: the language is that of its characters, whatever llguidance makes of terminals."""

from __future__ import annotations

import pytest

from octavo.structured_output.ebnf import EbnfError, ebnf_to_lark, is_ebnf
from tests.structured_output.languages import misjudged

SQL = """
root ::= select_statement

select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws   # escapes
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CHESS = """root ::= (
    # the opening
    "1. " move " " move "\\n"
    ([1-9] [0-9]? ". " move " " move "\\n")+
)
move ::= (pawn | piece | castle) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
CASES = {
    "a common example": (SQL, ["SELECT col_1  from table_1  where col_2 = 1 "], ["SELECT"]),
    "json": (JSON, ['{"a": [1, 2.5e3, "x\\n", true, {}]}', "{}"], ["{a}", "[", "[]"]),
    "white space that may swallow what follows": (ARITHMETIC, ["a+b= c\n", "(1 +2)*x=3\n", "a=b\n\n"], ["a", "a=b"]),
    "a parenthesis over lines": (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n", "1. e4 e5\n2. O-O exd6\n"], ["1. e4 e5\n"]),
    "an alternative on its own line": ('root ::= "a"\n  | "b"\n', ["a", "b"], ["c"]),
    "escapes": ('root ::= "\\u00e9" [\\u0430-\\u044f]+ "\\x41\\"\\\\"\n', ['éприA"\\'], ["e"]),
    "slashes and brackets": ('root ::= "a/b" [/] "[" [\\]\\[] "]" [^/]\n', ["a/b/[]]x"], ["a/b/[]]/"]),
    "any character": ("root ::= . .\n", ["a\n", "é本"], ["a"]),
    "a negated range and a hyphen": ("root ::= [^a-c]+ [a-]\n", ["xyza", "d-"], ["a"]),
    "names that are keywords": ('root ::= start-1 end\nstart-1 ::= "s"\nend ::= "e"\n', ["se"], []),
    "an empty alternative": ('root ::= "a" ("b" | )\n', ["a", "ab"], ["b"]),
    "repetitions": ('root ::= [a-z]{2,3} "x"{2} "y"{1,} "z"{0,1}\n', ["abxxy", "abcxxyyz"], ["axxy", "abxxyzz"]),
    "one terminal would eat the other": ('root ::= "a"* "ab" ("(" root ")")?', ["ab", "aaab(ab)"], ["a", "abab"]),
    "literals with a common beginning": (
        'root ::= ("foo" "bar" | "foobaz") ("(" root ")")?\n',
        ["foobar", "foobaz", "foobar(foobaz)"],
        ["foo"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_language_is_that_of_the_rules(name: str) -> None:
    grammar, good, bad = CASES[name]
    assert is_ebnf(grammar)
    assert misjudged(ebnf_to_lark(grammar), good, bad) == []


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a"\nroot ::= "b"\n', "line 2: rule 'root' is defined twice"),
        ('main ::= "a"\n', "no rule 'root'"),
        ("root ::= other\n", "'other', which is not defined"),
        ('root ::= "a\n', "line 1: cannot read"),
        ('root ::= ("a"\n', "expected '\\)'"),
        ("root ::= [z-a]\n", "line 1: the range 'z'-'a' is empty"),
        ("root ::= []\n", "empty"),
        ('root ::= "a")\n', "expected the name of a rule"),
        ("root ::= " + "(" * 500 + '"a"' + ")" * 500, "parentheses inside one another"),
        ('root ::= "\\UFFFFFFFF"\n', "not a character"),
    ],
)
def test_what_is_wrong_is_said(grammar: str, words: str) -> None:
    with pytest.raises(EbnfError, match=words):
        ebnf_to_lark(grammar)


def test_a_long_chain_of_rules_is_read() -> None:
    rules = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(5000)) + 'r5000 ::= "a"\n'
    assert ebnf_to_lark(rules).count("\n") == 5003


def test_lark_is_not_ebnf() -> None:
    assert not is_ebnf('start: "a" | b\nb: "::="\n')
