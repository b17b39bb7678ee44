import pickle

import pytest

from tokencustody import errors, protocols

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("error", "base"),
    [
        ("TokenCaptureFrozenError", RuntimeError),
        ("TokenCaptureRetiredError", errors.TokenCaptureFrozenError),
        ("RolloutRetiredError", LookupError),
        ("InvalidRecordError", ValueError),
        ("PayloadConflictError", ValueError),
        ("CorruptEntryError", RuntimeError),
        ("StagedCallMissingError", LookupError),
        ("LineageError", RuntimeError),
        ("StoreUnavailableError", ConnectionError),
        ("SchemaMismatchError", RuntimeError),
        ("StoreClosedError", RuntimeError),
    ],
)
def test_callers_can_catch_each_error_by_its_documented_base(error: str, base: type[Exception]) -> None:
    assert issubclass(getattr(errors, error), base)


@pytest.mark.parametrize(
    "name", ["TokenCaptureFrozenError", "TokenCaptureRetiredError", "RolloutRetiredError"]
)
def test_the_protocols_export_the_errors_they_define(name: str) -> None:
    assert getattr(protocols, name) is getattr(errors, name)


def test_the_error_for_missing_staged_calls_lists_their_keys_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.StagedCallMissingError(["r/a", "r/b"])))  # noqa: S301
    assert error.staging_keys == ["r/a", "r/b"]
    assert str(error) == "nothing is staged under 'r/a', 'r/b'"


def test_the_message_about_many_or_long_missing_calls_is_short_and_the_error_names_all() -> None:
    error = errors.StagedCallMissingError([f"r/{number}" for number in range(1000)])
    assert str(error).endswith("'r/19' and 980 more keys")
    assert len(error.staging_keys) == 1000
    assert len(str(errors.StagedCallMissingError(["r/" + "x" * 5000]))) < 300
