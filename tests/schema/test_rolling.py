"""Workers of two releases use one database while it is upgraded; older ones are shut out when they are to be gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.roles.secured import secured_database
from tests.schema.releases import AFTER, BEFORE, THIS, Workers, make_next, run, working
from tests.schema.test_command import run as run_here
from tests.support import probes
from tests.support.postgres import Server
from tokencustody import open_store
from tokencustody.database.url import parse_url
from tokencustody.errors import SchemaMismatchError, StoreUnavailableError
from tokencustody.roles.granting import grant
from tokencustody.schema import migrate
from tokencustody.schema.revisions import OLDEST, TABLES
from tokencustody.states import Role


@pytest.fixture(scope="session")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From where the next release is imported."""
    return make_next(tmp_path_factory.mktemp("next"))


def written(workers: Workers) -> set[str]:
    return {rollout for report in workers.stop() for rollout in json.loads(report)}


async def test_workers_of_two_releases_write_while_their_database_is_upgraded(
    empty_url: str, following: Path
) -> None:
    shown = parse_url(empty_url).display
    migrate.upgrade(empty_url)
    with working(THIS, empty_url, "older") as older:
        older.go_on()
        refused = run(following, "rollouts", "--url", empty_url)
        assert f"run `tokencustody db upgrade --url {shown}`" in refused.stderr
        assert refused.returncode == 1
        refused = run(following, "db", "upgrade", "--after", "--url", empty_url)
        assert (refused.returncode, migrate.current(empty_url)) == (1, migrate.HEAD)
        before = run(following, "db", "upgrade", "--before", "--url", empty_url)
        assert before.returncode == 0, before
        assert before.stdout.splitlines()[:2] == [f"applied {BEFORE}", f"{shown}: {migrate.HEAD} → {BEFORE}"]
        older.go_on()
        assert "this library works with it meanwhile" in run_here("current", "--url", empty_url).output
        with working(following, empty_url, "newer") as newer:
            older.go_on()
            newer.go_on()
            acknowledged = written(older)
            assert f"--after`: {AFTER}" in run(following, "db", "check", "--url", empty_url).stdout
            after = run(following, "db", "upgrade", "--after", "--url", empty_url)
            assert after.returncode == 0, after
            newer.go_on()
            acknowledged |= written(newer)
    verified = run(following, "verify", "--url", empty_url)
    assert verified.returncode == 0, verified
    stored = probes.rows(empty_url, "SELECT rollout_id, count(*) FROM entries GROUP BY rollout_id")
    assert dict(stored) == dict.fromkeys(acknowledged, 3)
    assert len(probes.rows(empty_url, "SELECT rollout_id FROM ledger_calls")) == len(acknowledged)
    checked = run(following, "db", "check", "--url", empty_url)
    assert checked.returncode == 0, checked
    async with open_store(empty_url) as store:
        with pytest.raises(SchemaMismatchError, match=rf"{AFTER}.*{migrate.HEAD}.*upgrade tokencustody"):
            await store.source.freeze("rollout")


def test_workers_that_were_granted_their_role_go_on_while_it_is_granted_again(
    postgres: Server, following: Path
) -> None:
    with secured_database(postgres, "worker") as (database, (worker,)):
        grant(database.url, Role.WORKER, worker, ["default"])

        def by_next(*arguments: str) -> str:
            ended = run(following, "db", *arguments, "--url", database.url)
            assert ended.returncode == 0, ended
            return ended.stdout

        def grant_again() -> None:
            stale = run(following, "db", "roles", "--url", database.url)
            assert (stale.returncode, "before the upgrade: grant it again" in stale.stdout) == (1, True), (
                stale
            )
            by_next("grant", "--role", "worker", "--run", "default", worker)
            by_next("roles")

        with working(THIS, database.url_as(worker), "older") as older:
            older.go_on()
            by_next("upgrade", "--before")
            older.go_on()
            grant_again()
            older.go_on()
            with working(following, database.url_as(worker), "newer") as newer:
                newer.go_on()
                acknowledged = written(older)
                by_next("upgrade", "--after")
                newer.go_on()
                grant_again()
                newer.go_on()
                acknowledged |= written(newer)
        stored = probes.rows(database.url, "SELECT rollout_id, count(*) FROM entries GROUP BY rollout_id")
        assert dict(stored) == dict.fromkeys(acknowledged, 3)


def test_a_database_goes_back_to_an_older_release(empty_url: str, following: Path) -> None:
    assert run(following, "db", "upgrade", "--url", empty_url).returncode == 0
    back = run(following, "db", "downgrade", "--yes", "--revision", migrate.HEAD, "--url", empty_url)
    assert back.returncode == 0, back
    assert migrate.check(empty_url) == []


def test_what_comes_before_ends_at_the_oldest_revision_that_this_library_works_with(empty_url: str) -> None:
    assert migrate.upgrade(empty_url, part="before") == (None, OLDEST)
    assert migrate.upgrade(empty_url, part="before") == (OLDEST, OLDEST)
    assert migrate.upgrade(empty_url, part="after") == (OLDEST, migrate.HEAD)
    for part in ("before", "after"):
        assert migrate.upgrade(empty_url, part=part) == (migrate.HEAD, migrate.HEAD)
    assert migrate.check(empty_url) == []


def test_an_upgrade_before_that_would_shut_older_workers_out_changes_nothing(empty_url: str) -> None:
    migrate.upgrade(empty_url, "0004_audit")
    with pytest.raises(
        SchemaMismatchError, match=r"0004_audit do not: end their workers.*nothing was changed"
    ):
        migrate.upgrade(empty_url, part="before")
    with pytest.raises(SchemaMismatchError, match="--after comes when workers of this release run"):
        migrate.upgrade(empty_url, part="after")
    assert migrate.current(empty_url) == "0004_audit"


def test_an_upgrade_before_that_leaps_over_what_shuts_older_workers_out_changes_nothing(
    empty_url: str, tmp_path: Path
) -> None:
    migrate.upgrade(empty_url)
    refused = run(make_next(tmp_path / "next", oldest=AFTER), "db", "upgrade", "--before", "--url", empty_url)
    assert f"libraries that work with {migrate.HEAD} do not: end their workers" in refused.stderr
    assert (refused.returncode, migrate.current(empty_url)) == (1, migrate.HEAD)
    assert migrate.check(empty_url) == []


def test_an_upgrade_after_of_a_file_that_is_not_there_makes_none(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="does not exist"):
        migrate.upgrade(tmp_path / "missing.db", part="after")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["before", "after"])
def test_of_two_upgrades_at_the_same_time_one_does_the_work(empty_url: str, part: str) -> None:
    migrate.upgrade(empty_url, OLDEST)
    with probes.workers(2, partial(migrate.upgrade, part=part)) as two:
        ends = migrate.HEAD if part == "after" else OLDEST
        assert sorted(two.act_on(empty_url)) == sorted([str((OLDEST, ends)), str((ends, ends))])


def test_a_revision_shuts_older_libraries_out_by_its_number_or_leaves_every_version(empty_url: str) -> None:
    def versions() -> dict[str, int]:
        return dict(probes.rows(empty_url, "SELECT name, version FROM wire_schema"))

    first = migrate.REVISIONS.index("0006_tables_version")
    migrate.upgrade(empty_url, migrate.REVISIONS[first - 1])
    for number, revision in enumerate(migrate.REVISIONS[first:], first):
        before = versions()
        migrate.upgrade(empty_url, revision)
        shuts_out = versions() != before
        if shuts_out:
            assert versions()[TABLES] == int(revision[:4])
        assert shuts_out or number <= migrate.REVISIONS.index(OLDEST)


def test_what_is_missing_is_said_with_when_and_how_to_apply_it(new_database: Callable[[], str]) -> None:
    url = new_database()
    shown = parse_url(url).display
    # A release may have none that comes after, or none before.
    after = migrate.REVISIONS[migrate.REVISIONS.index(OLDEST) + 1 :]
    said = run_here("upgrade", "--before", "--url", url).output.splitlines()
    lines = [
        f"to apply after the last older worker has ended, by `tokencustody db upgrade --url {shown} --after`: "
        f"{', '.join(after)}",
        "this library works with it meanwhile",
    ]
    assert (said[-2:] == lines) == bool(after)
    told = json.loads(run_here("current", "--json", "--url", url).output)
    assert told == {
        "url": shown,
        "head": migrate.HEAD,
        "revision": OLDEST,
        "before": [],
        "after": list(after),
        "works": True,
    }
    checked = run_here("check", "--url", url, code=1 if after else 0).output
    assert (f"by `tokencustody db upgrade --url {shown} --after`" in checked) == bool(after)
    migrate.downgrade(url, "0004_audit")
    said = run_here("current", "--url", url).output.splitlines()
    assert (
        f"before workers of this release start, by `tokencustody db upgrade --url {shown} --before`"
        in said[1]
    )
    assert said[-1].endswith("with --before while older workers run")
    assert not json.loads(run_here("current", "--json", "--url", url).output)["works"]
    for wrong in (("--before", "--after"), ("--before", "--revision", OLDEST)):
        assert "give one of" in run_here("upgrade", "--url", url, *wrong, code=2).output
