"""The sink: where a serving process puts calls, announces them, and says which ones it lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sqlalchemy import Connection, insert, select, update

from tokencustody.codec.calls import PackedEntry, pack_entry, validated
from tokencustody.database.faults import is_ours
from tokencustody.database.transactions import Doors
from tokencustody.errors import (
    AccessDeniedError,
    PayloadConflictError,
    StoreUnavailableError,
    TokenCaptureRetiredError,
)
from tokencustody.ids import check_call_id, check_rollout_id, is_call_id
from tokencustody.records import TokenEntry
from tokencustody.schema.tables import intents
from tokencustody.spill.files import in_file_thread
from tokencustody.spill.marks import Mark
from tokencustody.states import VersionEvent
from tokencustody.store.base import SqlStore, now
from tokencustody.store.writing import write_call
from tokencustody.txn.continuing import ParentReplacedError, checked_suffix, continued
from tokencustody.txn.fence import (
    RolloutKey,
    Stamp,
    advance_txn,
    happened_txn,
    lock_fence_txn,
    of_call,
    refuse_if_frozen,
)
from tokencustody.txn.putting import Put, new_call, read_base, read_base_on
from tokencustody.txn.reading import call_txn, chain_txn
from tokencustody.txn.sequences import KnownSequence, KnownSequences
from tokencustody.txn.settling import Intent, new_intent

if TYPE_CHECKING:
    from typing_extensions import Buffer

LOGGER = logging.getLogger(__name__)

# About what an intent takes on its way.
_INTENT_SIZE = 1024

_REFUSAL = select(intents.c.refusal_code, intents.c.refused_at).where(of_call(intents))
_REFUSE = update(intents).where(of_call(intents))
_ADD_INTENT = insert(intents)


class SqlTokenSink(SqlStore):
    """A `TokenSink` with the optional `begin_call` and `refuse_call`.

    Every method returns once its row is durable, and raises StoreUnavailableError when the deadline passes first.
    """

    async def put(self, entry: TokenEntry) -> None:
        """Store one call.

        The same call id with the same bytes is a no-op. With other bytes the first payload stays, the rollout is
        incomplete and PayloadConflictError (a ValueError) is raised. Raises InvalidRecordError for a malformed
        entry and EntryTooLargeError for one above `max_entry_bytes`, TokenCaptureFrozenError or
        TokenCaptureRetiredError after the fence.
        """
        entry, key = self._checked(entry)
        self._replay_once()
        with self._database.doors() as doors:
            await self._put(doors, doors.kept(KnownSequences), key, entry)

    async def put_continuation(self, entry: TokenEntry, prompt_suffix: Sequence[int] | Buffer) -> None:
        """Store one call as `put` does, whose prompt is its parent's whole sequence and then `prompt_suffix`.

        `entry` has no prompt ids, names a resolved parent, and is no delta. The store puts the prompt together, fills
        `digest` and `cum_len` where they are None, and stores the record that has them all. Raises as `put` does, and
        LineageError, with nothing stored, where the parent is not there, conflicts or has no tokens, and where a
        `digest` or `cum_len` that was given is not that of the sequence.
        """
        entry, key = self._checked(entry)
        suffix = checked_suffix(entry, prompt_suffix)
        parent = entry.parent_call_id or ""
        self._replay_once()
        with self._database.doors() as doors:
            sequences = doors.kept(KnownSequences)
            known = sequences.find(key, parent)
            if known is not None:
                try:
                    await self._put(doors, sequences, key, continued(entry, known, suffix), on=known)
                    return
                except ParentReplacedError:
                    pass  # by another process, so that it is read
            read = await _read_base(doors, sequences, key, parent)
            await self._put(doors, sequences, key, continued(entry, read, suffix), on=read)

    def _checked(self, entry: TokenEntry) -> tuple[TokenEntry, RolloutKey]:
        entry = validated(entry)
        key = RolloutKey(self.run, check_rollout_id(entry.rollout_id))
        check_call_id(entry.model_call_id)
        return entry, key

    async def _put(
        self,
        doors: Doors,
        sequences: KnownSequences,
        key: RolloutKey,
        entry: TokenEntry,
        on: KnownSequence | None = None,
    ) -> None:
        """Store a checked call, only where its parent has the sequence `on` if one is given."""
        packed = pack_entry(entry)
        self._check_size(len(packed.payload), key.rollout_id, entry.model_call_id)
        base = on or await _base(doors, sequences, key, entry, packed)
        new = new_call(key, entry, packed, Stamp.make(now(), self.written_by), base)
        leans_on_delta = base is not None and base.is_delta
        size = len(new.row["payload"])
        put = Put(new, entry, packed, base, only_on_base=on is not None)
        differing = await write_call(doors, put, size=size, alone=leans_on_delta)
        if differing:
            raise PayloadConflictError(
                f"model call {entry.model_call_id} of rollout {key.rollout_id} was stored before with other bytes "
                f"(differing: {', '.join(differing)}); the first payload stays and the rollout is incomplete"
            )
        if not packed.is_delta:
            sequences.keep(key, entry.model_call_id, KnownSequence(packed.sha256, packed.sequence()))

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Announce a call before it is dispatched. A repeat is a no-op.

        An intent with neither an entry nor a refusal at freeze makes the rollout incomplete. Raises
        TokenCaptureFrozenError or TokenCaptureRetiredError after the fence.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        check_call_id(model_call_id)
        intent = Intent(new_intent(key, model_call_id, Stamp.make(now(), self.written_by)))
        self._replay_once()
        with self._database.doors() as doors:
            await write_call(doors, intent, size=_INTENT_SIZE)

    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
        """Record that the engine refused a call, so that its intent does not dangle. `code` is the engine's own, None
        where it gave none.

        The same code again is a no-op, and so is a refusal without one; another code raises PayloadConflictError (a
        ValueError), and marks nothing. Raises TokenCaptureFrozenError or TokenCaptureRetiredError after the fence.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        check_call_id(model_call_id)
        if code is not None:
            check_call_id(code, "code")
        stamp = Stamp.make(now(), self.written_by)

        def refuse(connection: Connection) -> None:
            fence = lock_fence_txn(connection, key, stamp)
            if happened_txn(connection, key, stamp):
                return  # the try before stored it; the row may be gone since, with its rollout
            refuse_if_frozen(fence, key, f"the refusal of call {model_call_id}")
            found = connection.execute(_REFUSAL, key.named(model_call_id)).one_or_none()
            if found is not None and found.refused_at is not None:
                if code not in (None, found.refusal_code):
                    held = (
                        "without a code"
                        if found.refusal_code is None
                        else f"with the code {found.refusal_code}"
                    )
                    raise PayloadConflictError(
                        f"model call {model_call_id} of rollout {rollout_id} was refused before {held}; that stays"
                    )
                return
            if found is None:
                connection.execute(_ADD_INTENT, new_intent(key, model_call_id, stamp).row)
            connection.execute(_REFUSE, key.named(model_call_id, refusal_code=code, refused_at=stamp.at))
            advance_txn(connection, key, fence, VersionEvent.REFUSAL, stamp, model_call_id=model_call_id)

        self._replay_once()
        with self._database.doors() as doors:
            await doors.write(refuse, rollout=key)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Record that a call of this rollout was not captured, so that its sample is masked.

        Works on a frozen rollout too, where it changes the version and so invalidates a drop of the old one. Raises
        TokenCaptureRetiredError for a retired rollout.

        When the database cannot be reached, or cannot store the mark for whatever reason, the mark is kept on this host
        and this returns all the same, with a warning in the log: the mark survives a power cut, and is brought into
        the database by this store, by the next one on this host that uses the database, and in any case before their
        next freeze, drop, retire or delete of the rollout. A mark that waited until its rollout was retired is
        discarded, with a warning. One that waited while another host deleted the rollout marks it anew: a sample too
        few is better than one that lacks a call.
        Raises StoreUnavailableError when the mark cannot be kept on this host either, the error of the database with
        `spill=None`, and AccessDeniedError, with nothing kept, where the database's user may not mark it.
        """
        key = RolloutKey(self.run, check_rollout_id(rollout_id))
        if not isinstance(model_call_id, str) or model_call_id:
            check_call_id(model_call_id)
        mark = Mark(key, model_call_id, Stamp.make(now(), self.written_by))
        self._replay_once()
        with self._database.doors() as doors:
            try:
                await doors.write(mark.store_txn, rollout=key)
            except (AccessDeniedError, TokenCaptureRetiredError):
                raise  # nothing that is replayed later would be let in
            except Exception as exc:
                # Whatever went wrong: a call that was lost is known only here.
                await self._keep(doors, mark, exc)

    async def _keep(self, doors: Doors, mark: Mark, cause: Exception) -> None:
        if self._replayer is None:
            raise cause
        # What a driver says besides may quote its statement.
        said = str(cause) if is_ours(cause) else type(cause).__name__
        spill = self._replayer.spill
        try:
            give_up = self._database.end_of_patience()
            path = await in_file_thread(lambda: spill.keep(mark), give_up)
        except OSError as error:
            exc = error if str(error) else f"{spill.folder} does not answer"
            LOGGER.error("%s is lost: %s; and it cannot be kept on this host: %s", mark, said, exc)
            raise StoreUnavailableError(
                f"{said}; and {mark} cannot be kept on this host: {exc}; mend that, or name another folder "
                "with the option spill, and mark the rollout again"
            ) from cause
        doors.count("spilled_marks")
        LOGGER.warning("%s waits on this host, in %s: %s", mark, path, said)
        self._replayer.start()


async def _base(
    doors: Doors, sequences: KnownSequences, key: RolloutKey, entry: TokenEntry, packed: PackedEntry
) -> KnownSequence | None:
    """Return the sequence of the parent, if it is proven that the prompt begins with it."""
    parent = entry.parent_call_id
    if entry.prompt_is_delta or not is_call_id(parent):
        return None
    base = sequences.find(key, parent)
    if base is None or not base.ids or not packed.begins_with(base.ids):
        # Another process wrote it, or wrote it anew.
        base = await _read_base(doors, sequences, key, parent)
        if base is not None and not base.is_delta:
            sequences.keep(key, parent, base)
    return base if base is not None and packed.begins_with(base.ids) else None


async def _read_base(
    doors: Doors, sequences: KnownSequences, key: RolloutKey, parent: str
) -> KnownSequence | None:
    row = await doors.read(lambda connection: call_txn(connection, key, parent))
    if row is None:
        return None
    beginning = sequences.find(key, row.parent_call_id) if row.shared_len else None
    if beginning is not None:
        # Most often this process put the call before, so only the last link of the chain need be read.
        base = await asyncio.to_thread(read_base_on, key, row, beginning)
        if base is not None:
            return base
    chain = [row]
    if row.shared_len or row.prompt_is_delta:
        chain = list(await doors.read(lambda connection: chain_txn(connection, key, parent)))
    return await asyncio.to_thread(read_base, key, chain, parent)
