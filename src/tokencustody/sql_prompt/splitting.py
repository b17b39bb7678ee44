"""Where one statement of PostgreSQL ends and the next begins."""

from __future__ import annotations

import re

_SPACE = r"[ \t\n\r\f\v]"
_LETTER = r"A-Za-z_\x80-\U0010ffff"
_DOLLARS = rf"\$(?:[{_LETTER}][{_LETTER}0-9]*)?\$"
# Up to the quote that ends a string in which a backslash takes the next character.
_ESCAPED = r"(?:[^'\\]|''|\\.)*+'"
# A string goes on, by the rules of its beginning, in the next quotes after the end of a line.
_NEXT_LINE = rf"(?:[ \t\f\v]|--[^\n\r]*+)*+[\n\r](?:{_SPACE}|--[^\n\r]*+)*+"
_TOKEN = re.compile(
    rf"""
    (?P<blank> {_SPACE}+ | --[^\n\r]* )
  | (?P<comment> /\* )
  | (?P<string> [eE]'{_ESCAPED} (?: {_NEXT_LINE}'{_ESCAPED} )*+ (?! {_NEXT_LINE}' ) )
  | (?P<quoted> '(?:[^']|'')*+' | "(?:[^"]|"")*+" )
  | (?P<dollars> {_DOLLARS} ) .*? (?P=dollars)
  | (?P<open> [eE]?' | " | {_DOLLARS} )
  | (?P<word> [{_LETTER}][{_LETTER}0-9$]* )
  | (?P<end> ; )
  | (?P<other> . )
    """,
    re.DOTALL | re.VERBOSE,
)
_COMMENT = re.compile(r"/\*|\*/")


def split(text: str) -> tuple[list[str], str]:
    """Return the statements of `text` that end in a semicolon, and what follows the last of them.

    What holds nothing but blanks and comments is no statement, unless a comment at the end of `text` is not closed.
    """
    found: list[str] = []
    start, place, is_empty = 0, 0, True
    while place < len(text):
        kind, place = _token(text, place)
        if kind == "open":
            return found, text[start:].strip()
        if kind == "end":
            if not is_empty:
                found.append(text[start:place].strip())
            start, is_empty = place, True
        elif kind != "blank":
            is_empty = False
    return found, "" if is_empty else text[start:].strip()


def first_word(statement: str) -> str:
    """Return the first word of a statement in upper case, parentheses before it left out; else nothing."""
    place = 0
    while place < len(statement):
        start = place
        kind, place = _token(statement, start)
        if kind == "word":
            return statement[start:place].upper()
        if kind != "blank" and statement[start:place] != "(":
            break
    return ""


def _token(text: str, place: int) -> tuple[str, int]:
    """Return of what kind the token at `place` is, and where it ends."""
    token = _TOKEN.match(text, place)
    assert token is not None  # noqa: S101 - the last branch takes any character
    if token.lastgroup == "comment":
        return _comment(text, token.end())
    return token.lastgroup or "", token.end()


def _comment(text: str, place: int) -> tuple[str, int]:
    depth = 1
    for mark in _COMMENT.finditer(text, place):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return "blank", mark.end()
    return "open", len(text)
