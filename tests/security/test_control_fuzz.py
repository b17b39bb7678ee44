"""The control routes against their OpenAPI document: whatever is sent, the answer is one that is declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.control.serving import AUTH
from tests.security.serving import serve_process
from tests.support import databases
from tests.support.postgres import Server
from tokencustody.control.openapi import control_openapi
from tokencustody.schema import migrate

schema = schemathesis.openapi.from_dict(control_openapi())


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def base_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "sqlite":
        store_url = f"sqlite:///{tmp_path_factory.mktemp('fuzz') / 'captures.db'}"
        migrate.upgrade(store_url)
        with serve_process(store_url) as url:
            yield url
    else:
        server: Server = request.getfixturevalue("postgres")
        template: str = request.getfixturevalue("_migrated_template")
        with databases.fresh(server, template) as store_url, serve_process(store_url) as url:
            yield url


@schema.parametrize()
@settings(max_examples=15, deadline=None)
def test_every_answer_is_as_declared(case: Any, base_url: str) -> None:
    # Whether a rollout is there depends on what was sent before: 410 is declared, and is no refusal of valid data.
    case.call_and_validate(base_url=base_url, headers=AUTH, excluded_checks=[positive_data_acceptance])


@schema.exclude(path="/healthz").parametrize()
@settings(max_examples=5, deadline=None)
def test_whatever_is_sent_without_the_token_is_401(case: Any, base_url: str) -> None:
    answer = case.call(base_url=base_url, headers={"Authorization": "Bearer another"})
    assert answer.status_code == 401
    assert set(answer.json()) == {"detail"}
