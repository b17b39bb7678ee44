"""A store opens only a database that fits it, and says what to do about any other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.support import probes
from tokencustody import open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import CorruptEntryError, SchemaMismatchError
from tokencustody.overview.runs import summarize_runs
from tokencustody.schema import migrate, revisions
from tokencustody.schema.opening import CaptureDatabase


async def refusal(url: str) -> str:
    """Return why a store refuses to open `url`, the same for each of its parts."""
    uses: list[Callable[..., Awaitable[object]]] = []
    async with open_store(url) as store:
        # Not a mark, which would wait on this host.
        uses = [partial(store.sink.begin_call, model_call_id="call"), store.source.freeze]
        reasons = set()
        for use in uses:
            with pytest.raises(SchemaMismatchError) as refused:
                await use("rollout")
            reasons.add(str(refused.value))
    (reason,) = reasons
    return reason


def upgrade_command(url: str) -> str:
    return f"run `tokencustody db upgrade --url {parse_url(url).display}`"


async def test_an_empty_postgresql_database_is_named_with_the_command(empty_postgres_url: str) -> None:
    reason = await refusal(empty_postgres_url)
    assert "has no tokencustody tables" in reason
    assert migrate.HEAD in reason
    assert upgrade_command(empty_postgres_url) in reason
    assert probes.objects(empty_postgres_url) == []


async def test_a_new_sqlite_file_is_created(new_sqlite_url: str) -> None:
    assert probes.objects(new_sqlite_url) == []  # leaves an empty file
    async with open_store(new_sqlite_url) as store:
        assert (await store.source.freeze("rollout")).version == 1
    assert migrate.check(new_sqlite_url) == []


async def test_a_sqlite_file_with_other_tables_is_left_alone(new_sqlite_url: str) -> None:
    probes.run_script(new_sqlite_url, "CREATE TABLE of_somebody_else (a INTEGER)")
    reason = await refusal(new_sqlite_url)
    assert "has no tokencustody tables" in reason
    assert upgrade_command(new_sqlite_url) in reason
    assert probes.objects(new_sqlite_url) == ["of_somebody_else"]


async def test_a_database_taken_back_to_base_is_refused_or_created_like_a_new_one(migrated_url: str) -> None:
    migrate.downgrade(migrated_url, "base")
    if migrated_url.startswith("sqlite"):
        async with open_store(migrated_url) as store:
            assert (await store.source.freeze("rollout")).version == 1
    else:
        assert "has no tokencustody tables" in await refusal(migrated_url)


async def test_an_older_revision_is_refused_with_both_revisions_and_the_command(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = migrate.HEAD
    monkeypatch.setattr(revisions, "REVISIONS", (*migrate.REVISIONS, "9998_next"))
    monkeypatch.setattr(revisions, "HEAD", "9998_next")
    monkeypatch.setattr(revisions, "OLDEST", "9998_next")
    reason = await refusal(migrated_url)
    assert f"is on revision {held}, this library on 9998_next" in reason
    assert upgrade_command(migrated_url) in reason


async def test_a_revision_that_comes_before_the_next_release_shuts_nobody_out(migrated_url: str) -> None:
    probes.run_script(migrated_url, "UPDATE alembic_version SET version_num = '9999_later'")
    async with open_store(migrated_url) as store:
        assert (await store.source.freeze("rollout")).version == 1


@pytest.mark.parametrize(
    "change",
    [
        "version_num = '9999_later'; UPDATE wire_schema SET version = 9999 WHERE name = 'tables'",
        "version_num = '9999_later'; UPDATE wire_schema SET version = 9 WHERE name = 'payload_codec'",
        "version_num = '9999_later'; DELETE FROM wire_schema WHERE name = 'tables'",
        "version_num = '0002_of_nobody'",
        "version_num = 'feedc0ffee'",
    ],
)
async def test_an_unknown_revision_is_refused_with_both_revisions_and_the_advice(
    migrated_url: str, change: str
) -> None:
    probes.run_script(migrated_url, f"UPDATE alembic_version SET {change}")
    reason = await refusal(migrated_url)
    assert change.split("'")[1] in reason
    assert migrate.HEAD in reason
    assert reason.endswith("upgrade tokencustody")


async def test_a_half_deleted_version_table_is_refused(migrated_url: str) -> None:
    probes.run_script(migrated_url, "DELETE FROM alembic_version")
    assert "has no tokencustody tables" in await refusal(migrated_url)


async def test_the_revision_table_of_another_application_is_recognised(empty_url: str) -> None:
    probes.run_script(
        empty_url,
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL);"
        "INSERT INTO alembic_version VALUES ('5d2c9f01aa10')",
    )
    reason = await refusal(empty_url)
    assert "5d2c9f01aa10 of another application" in reason
    assert migrate.HEAD in reason
    with pytest.raises(SchemaMismatchError, match="another application"):
        migrate.upgrade(empty_url)


@pytest.mark.parametrize("name", migrate.WIRE_SCHEMAS)
async def test_a_newer_wire_schema_is_refused_by_name(migrated_url: str, name: str) -> None:
    probes.run_script(migrated_url, f"UPDATE wire_schema SET version = 9999 WHERE name = '{name}'")
    reason = await refusal(migrated_url)
    assert f"wire schema {name} version 9999" in reason
    assert f"version {migrate.WIRE_SCHEMAS[name]}" in reason
    assert reason.endswith("upgrade tokencustody")


async def test_a_wire_schema_that_this_library_never_heard_of_is_refused(migrated_url: str) -> None:
    probes.run_script(migrated_url, "INSERT INTO wire_schema VALUES ('staged_delta', 1)")
    assert "wire schema staged_delta version 1" in await refusal(migrated_url)


async def test_an_older_wire_schema_can_be_read(migrated_url: str) -> None:
    probes.run_script(migrated_url, "UPDATE wire_schema SET version = 1 WHERE name = 'fingerprint'")
    async with open_store(migrated_url) as store:
        assert (await store.source.freeze("rollout")).version == 1


async def test_the_password_is_in_no_refusal(empty_postgres_url: str) -> None:
    scheme, rest = empty_postgres_url.split("://")
    userinfo, host = rest.rsplit("@", 1)
    user = userinfo.split(":")[0]
    if ":" in userinfo:
        secret = userinfo.split(":")[1]
        url = empty_postgres_url
    else:
        secret = "not-to-be-seen"  # noqa: S105 - of nobody
        url = f"{scheme}://{user}:{secret}@{host}"
    assert secret not in await refusal(url)


@pytest.mark.parametrize(
    "lost", ["ALTER TABLE fences RENAME COLUMN opened_at TO begun_at", "ALTER TABLE exports RENAME TO lost"]
)
async def test_what_the_tables_lack_is_told_by_the_check_that_is_named(migrated_url: str, lost: str) -> None:
    # SQLite would not rename what its views name.
    probes.run_script(migrated_url, f"DROP VIEW audit_exports; DROP VIEW audit_rollouts; {lost}")
    database = CaptureDatabase(parse_url(migrated_url))
    try:
        with pytest.raises(CorruptEntryError) as refused:
            await summarize_runs(database)
    finally:
        await database.close()
    assert f"`tokencustody db check --url {parse_url(migrated_url).display}`" in str(refused.value)
    column = lost.partition("COLUMN ")[2].partition(" ")[0]
    assert any(
        line.startswith(f"missing: {'fences.' + column if column else 'exports'}")
        for line in migrate.check(migrated_url)
    )
