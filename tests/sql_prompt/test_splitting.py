"""Statements of PostgreSQL are split where the server itself ends them."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokencustody.sql_prompt.splitting import first_word, split

# What begins or ends something, and what does not.
SOUP = st.lists(st.sampled_from([*"'\"$;*/\\-\n ae1é(", "/*", "*/", "--", "$$", "$a$", "E'", "''"])).map(
    "".join
)


def comment(inside: str) -> str:
    """Return a comment that is closed, however deep the comments in it are."""
    inside = inside.replace("/*/", "").replace("*/", "")
    return f"/*{inside} {'*/' * (inside.count('/*') + 1)}"


CLOSED = st.one_of(
    SOUP.map(lambda inside: "'" + inside.replace("'", "''") + "'"),
    SOUP.map(lambda inside: "E'" + inside.replace("\\", "\\\\").replace("'", "\\'") + "'"),
    SOUP.map(lambda inside: "E'a'\n'" + inside.replace("\\", "\\\\").replace("'", "\\'") + "'"),
    SOUP.map(lambda inside: '"' + inside.replace('"', '""') + '"'),
    SOUP.map(lambda inside: f"$tag${inside}$tag$"),
    SOUP.map(comment),
    SOUP.map(lambda inside: "--" + inside.replace("\n", "") + "\n"),
    st.sampled_from(["1", "name", "a$$", "(", ")", ",", "=", "/", "*", "-", "é$a$", "$1"]),
)
# Blanks keep two of them from being one.
STATEMENT = st.lists(CLOSED).map(lambda parts: " ".join(["SELECT", *parts, "x"]))


@given(st.lists(STATEMENT), STATEMENT)
def test_each_statement_comes_out_as_it_went_in(statements: list[str], rest: str) -> None:
    ended = [f"{statement};" for statement in statements]
    assert split("\n".join(ended)) == (ended, "")
    assert split("".join([*ended, rest])) == (ended, rest)


def test_the_server_reads_as_one_what_is_one_here(postgres_url: str) -> None:
    async def run() -> None:
        connection = await asyncpg.connect(postgres_url)
        read = 0

        async def ask(statement: str) -> None:
            nonlocal read
            try:
                await connection.prepare(statement)
                read += 1
            except asyncpg.PostgresError as exc:
                if "multiple commands" in str(exc) or "unterminated" in str(exc):
                    raise AssertionError(statement) from exc

        loop = asyncio.get_running_loop()

        @settings(max_examples=300)
        @given(st.lists(SOUP | CLOSED).map("".join))
        def try_one(text: str) -> None:
            for statement in split(f"SELECT {text};")[0]:
                asyncio.run_coroutine_threadsafe(ask(statement), loop).result()

        try:
            await asyncio.to_thread(try_one)
        finally:
            await connection.close()
        assert read

    asyncio.run(run())


@pytest.mark.parametrize("unclosed", ["/* /* */ ;", "'a;", "E'\\';", '"a;', "$$;", "$a$;$$;", "E'' \n '\\';"])
def test_what_is_not_closed_waits_for_more(unclosed: str) -> None:
    assert split(f"SELECT 1; SELECT {unclosed}") == (["SELECT 1;"], f"SELECT {unclosed}".strip())


@pytest.mark.parametrize(
    ("statement", "word"),
    [
        ("SELECT 1", "SELECT"),
        (" (( with a AS (SELECT 1) SELECT 1", "WITH"),
        ("/* /* */ SELECT */ COPY t TO PROGRAM 'x'", "COPY"),
        ("-- SELECT\rDELETE FROM t", "DELETE"),
        ("/* SELECT", ""),
        ("'SELECT'", ""),
        ("", ""),
    ],
)
def test_the_first_word_is_that_of_the_server(statement: str, word: str) -> None:
    assert first_word(statement) == word
