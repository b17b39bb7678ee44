import pytest

from tokencustody import errors, protocols


@pytest.mark.parametrize(
    ("error", "base"),
    [
        ("TokenCaptureFrozenError", RuntimeError),
        ("TokenCaptureRetiredError", errors.TokenCaptureFrozenError),
        ("RolloutRetiredError", LookupError),
        ("InvalidRecordError", ValueError),
        ("PayloadConflictError", ValueError),
        ("CorruptEntryError", RuntimeError),
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
