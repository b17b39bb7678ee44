"""Every error a caller can meet, in one place.

Errors that the capture protocols define keep their names and base classes; the rest are this store's own.
No message contains a password, a token id or a log probability.
"""

from __future__ import annotations

from collections.abc import Sequence


class TokenCaptureFrozenError(RuntimeError):
    """A write arrived after its rollout was frozen.

    The caller drops the late record and does not mark the rollout incomplete: the freeze has already judged
    completeness from the intents, and a mark would invalidate a snapshot that may have been consumed.
    """


class TokenCaptureRetiredError(TokenCaptureFrozenError):
    """A write arrived after its rollout was retired. Handle it exactly like `TokenCaptureFrozenError`."""


class RolloutRetiredError(LookupError):
    """The ledger of a retired rollout was read. An empty one would look like a rollout without calls."""


class InvalidRecordError(ValueError):
    """A value was refused before any transaction started. The message names the field."""


class LoneSurrogateError(InvalidRecordError):
    """A conversation item holds text that UTF-8 cannot carry. The message names the item and the field."""


class EntryTooLargeError(InvalidRecordError):
    """A call takes more bytes than the store accepts. The message says how many, and names the option."""


class PayloadConflictError(ValueError):
    """A model call id was used again with other bytes.

    The first payload stays, the rollout is incomplete, and the table `failures` holds the second payload's
    hash, the fields that differ and who wrote it.
    """


class CorruptEntryError(RuntimeError):
    """A stored call is not what was written: its bytes do not match their recorded hash, or do not decode."""


class StagedCallMissingError(LookupError):
    """Staged calls that were asked for are not there. `staging_keys` lists all of them, in the order asked.

    The message names the first twenty, the longest shortened.
    """

    def __init__(self, staging_keys: Sequence[str]) -> None:
        super().__init__(staging_keys)
        self.staging_keys = list(staging_keys)

    def __str__(self) -> str:
        shown = [repr(key) if len(key) <= 200 else f"{key[:200]!r}…" for key in self.staging_keys[:20]]
        more = len(self.staging_keys) - len(shown)
        return f"nothing is staged under {', '.join(shown)}" + (f" and {more} more keys" if more else "")


class LineageError(RuntimeError):
    """A parent's token sequence could not be proven by its digest, so no prefix is returned."""


class StoreUnavailableError(ConnectionError):
    """The database could not be reached or kept failing until the deadline. The last cause is chained.

    Also that it may not be relied on as it is: a SQLite file that is no longer at its path, or a mark of the rollout on
    this host that is damaged. The message says what to do.

    `is_refusal`: the database answered, and refused what was asked of it, which it may allow to another call.
    """

    is_refusal = False


class DamagedMarkError(StoreUnavailableError):
    """A mark of the rollout that waited on this host is damaged or cannot be read. Other rollouts are not concerned.

    The message says how to decide on it.
    """


class AccessDeniedError(StoreUnavailableError):
    """PostgreSQL refused a statement to the role that the URL names. Asking again does not help.

    The message says which of the roles that `tokencustody db grant` gives may do what; `denied` is what comes before.
    """

    is_refusal = True

    def __init__(self, denied: str) -> None:
        super().__init__(denied)
        self.denied = denied

    def __str__(self) -> str:
        return (
            f"{self.denied}; a worker writes and resolves within the runs it was granted, a trainer freezes, reads and "
            "retires, an auditor reads all but token data, the owner deletes: see `tokencustody db roles`"
        )


class BackupError(RuntimeError):
    """A backup could not be made, and nothing was kept of it. The message says why and what to do."""


class RoleError(RuntimeError):
    """A role could not be granted or taken away, and nothing was changed. The message says why and what to do."""


class SchemaMismatchError(RuntimeError):
    """The database is not one for this library: on a revision out of its range, or in another encoding than UTF8.

    The message names both and the command to run.
    """


class DurabilityError(RuntimeError):
    """The database is set up so that it acknowledges commits before they are durable. The message says what to set."""


class StoreClosedError(RuntimeError):
    """A store was used after `close()`."""


class RolloutNotFoundError(LookupError):
    """No rollout, or more than one, has the id that was asked for. The message says where and what to do."""


class ExportError(RuntimeError):
    """An export cannot begin or go on. The message says why and what to do; nothing that was finished is lost."""
