"""`export`: frozen rollouts out of the database into a folder of files, and the hand-over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol
from uuid import uuid4

from tokencustody.chains.reading import FrozenRollout, RolloutRows, making_sense, rollout_txn
from tokencustody.chains.reasons import LeftOut, Why, why_not
from tokencustody.database.faults import reach
from tokencustody.database.folders import local_path
from tokencustody.database.registry import identity_of
from tokencustody.database.transactions import Database
from tokencustody.database.url import DatabaseUrl, parse_url
from tokencustody.errors import CorruptEntryError, ExportError
from tokencustody.export.beginning import check_runs, report_of_nothing
from tokencustody.export.calls import CallsPart
from tokencustody.export.folder import ExportFolder, saying
from tokencustody.export.gym import GymPart
from tokencustody.export.handover import ExportMarks, HandOver
from tokencustody.export.manifest import (
    MANIFEST_VERSION,
    holds_anything,
    holds_rows,
    make_manifest,
    read_manifest,
    report_of_none,
)
from tokencustody.export.options import ExportOptions
from tokencustody.export.parquet import ParquetPart, require_pyarrow
from tokencustody.export.report import Exported, ExportReport, Part, WrittenFile
from tokencustody.export.rewards import Rewards, read_rewards
from tokencustody.schema.opening import CaptureDatabase
from tokencustody.states import FenceState, Format
from tokencustody.store.base import now
from tokencustody.txn.asked import check_asked
from tokencustody.txn.fence import RolloutKey
from tokencustody.txn.selection import count, pages
from tokencustody.watching import Watch, unwatched

DEADLINE = 30.0
# Rollouts whose Gym files are finished together, and things left out after which a part ends in any case.
_GYM_ROLLOUTS_PER_PART = 64
_LEFT_OUT_PER_PART = 10_000


class _PartWriter(Protocol):
    rows: int
    size: int

    def add(self, rollout: FrozenRollout) -> tuple[Exported | None, list[LeftOut]]: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...


async def export(
    url: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    options: ExportOptions | None = None,
    *,
    rewards: str | os.PathLike[str] | None = None,
    mark: bool = True,
    retire: bool = False,
    watch: Watch = unwatched,
    spill: str | os.PathLike[str] | None = "",
    deadline: float = DEADLINE,
) -> ExportReport:
    """Write the frozen rollouts that `options` ask for to files in `destination`, and mark them in the database.

    The folder is made. Files appear whole, the manifest last. The same call again on the same folder goes on after the
    last finished part; on a finished folder it writes no file, and only hands over what was not yet. With `retire`,
    a rollout is marked and retired in one transaction, if it is still exactly what the files hold and nothing of it
    was left out; the files are hashed again first. `mark=False` writes nothing to the database.

    While there is no rollout to write, no folder is made either, so that the same call may be repeated until there is;
    nor is one left when everything was left out, which the report says (`all_left_out`) and lists.

    Raises InvalidRecordError for a destination or rewards that are an address, as `s3://…`; RolloutNotFoundError for a
    run that the database does not have or a prefix with which nothing in it begins; ExportError for a folder that holds
    something else, another export or one of another database, for rewards that cannot be read, and for files that are
    not what the manifest lists; StoreUnavailableError when the database cannot be reached for `deadline` seconds.
    """
    if retire and not mark:
        raise ValueError("retire needs the mark, which says where the rollout went")
    options = options or ExportOptions()
    if options.format is Format.PARQUET:
        require_pyarrow()
    elif rewards is not None:
        raise ValueError(f"rewards are joined to Parquet rows, not to {options.format}")
    folder = ExportFolder(local_path(destination, "an export"))
    joined = read_rewards(local_path(rewards, "a file of rewards")) if rewards is not None else Rewards()
    database = CaptureDatabase(parse_url(url), deadline=deadline, pool_size=1, read_only=True)
    marks = ExportMarks(url, deadline=deadline, pool_size=1, spill=spill)
    try:
        # The database first: an address, or a name, that leads nowhere leaves no folder behind.
        await check_runs(database, options, joined)
        if not folder.is_begun:
            await check_asked(database, options.filter())
            nothing = await report_of_nothing(database, folder, options)
            if nothing is not None:
                return nothing
        with folder.opened():
            exporting = _Export(database, folder, options, joined, watch)
            report, rollouts = await exporting.run()
            if mark and not report.all_left_out:
                await _hand_over(marks, folder, report, rollouts, retire, watch)
            return report
    finally:
        await marks.close()
        await database.close()


class _Export:
    """One run of an export, up to the finished files."""

    def __init__(
        self,
        database: Database,
        folder: ExportFolder,
        options: ExportOptions,
        rewards: Rewards,
        watch: Watch,
    ) -> None:
        self._database = database
        self._folder = folder
        self._options = options
        self._rewards = rewards
        self._watch = watch
        self._library = f"tokencustody {version('tokencustody')}"
        self._parts: list[Part] = []

    async def run(self) -> tuple[ExportReport, list[Exported]]:
        """Write what is not written yet; return what the files hold."""
        header = {
            "export_id": uuid4().hex,
            "database": self._database.url.display,
            "database_identity": _identity(self._database.url),
            "library": self._library,
            "started_at": now().isoformat(),
            "options": self._options.document(self._rewards),
        }
        finished = self._folder.manifest()
        if finished is not None:
            manifest, sha256 = finished
            self._check_same(header, manifest, ("database_identity", "options"))
            self._folder.check_alone(_files(manifest))
            self._folder.remove_progress()
            return read_manifest(self._folder.path, manifest, sha256, already_finished=True)
        begun = self._folder.progress()
        if begun is None:
            self._folder.begin(header)
        else:
            self._check_same(header, begun[0], ("database_identity", "options", "library"))
            header, self._parts = begun
        self._folder.remove_unfinished(self._parts)
        self._folder.check_alone(file for part in self._parts for file in part.files)
        await self._write_parts()
        if not holds_anything(self._parts, self._options):
            self._folder.vanish()
            return report_of_none(self._folder.path, self._parts, self._options), []
        await reach("an export wrote all parts, and no manifest")
        manifest = make_manifest(header, self._parts, self._options, self._rewards)
        return read_manifest(
            self._folder.path, manifest, self._folder.finish(manifest), resumed=begun is not None
        )

    def _check_same(self, mine: dict[str, Any], theirs: dict[str, Any], names: Sequence[str]) -> None:
        if theirs.get("manifest_version", MANIFEST_VERSION) < MANIFEST_VERSION:
            raise ExportError(
                f"{self._folder.path} holds an export of {theirs['library']}, which made rows by other rules; "
                "export to a new folder"
            )
        for name in names:
            if mine[name] == theirs[name]:
                continue
            if name == "options":
                differing = sorted(
                    option for option, value in mine[name].items() if theirs[name].get(option, ...) != value
                )
                raise ExportError(
                    f"{self._folder.path} holds an export with other options ({', '.join(differing)}); "
                    "repeat those, or name a new folder"
                )
            what = {
                "library": f"was begun by {theirs[name]}; finish it with that",
                "database_identity": f"is of another database, {theirs['database']}; use that",
            }[name]
            raise ExportError(f"the export in {self._folder.path} {what}, or name a new folder")

    async def _write_parts(self) -> None:
        wanted = self._options.filter()
        after = RolloutKey(*self._parts[-1].after) if self._parts else None
        with self._watch("exporting", await count(self._database, wanted)) as advance:
            advance(sum(len(part.rollouts) for part in self._parts))
            self._begin_part()
            try:
                async for page in pages(self._database, wanted, after=after):
                    for fence in page:
                        after = RolloutKey(fence.run, fence.rollout_id)
                        await self._add(after, FenceState(fence.state))
                        advance(1)
                        if self._part_is_full():
                            await self._finish_part(after)
                            self._begin_part()
                if after is not None and (self._rollouts or self._left_out):
                    await self._finish_part(after)
            finally:
                self._writer.abandon()

    def _begin_part(self) -> None:
        self._writer = self._new_writer(len(self._parts))
        self._rollouts: list[Exported] = []
        self._left_out: list[LeftOut] = []

    def _new_writer(self, number: int) -> _PartWriter:
        match self._options.format:
            case Format.PARQUET:
                return ParquetPart(
                    self._folder,
                    number,
                    rules=self._options.rules(),
                    rewards=self._rewards,
                    exported_by=self._library,
                )
            case Format.CALLS:
                return CallsPart(self._folder, number)
            case Format.GYM:
                return GymPart(self._folder)

    async def _add(self, key: RolloutKey, state: FenceState) -> None:
        if state is FenceState.RETIRED and self._options.rollout_ids is None:
            return  # nothing is left of it, and a database may have millions
        read = partial(rollout_txn, key=key, include_incomplete=self._options.include_incomplete)
        try:
            rows = await self._database.read(read)
        except CorruptEntryError as exc:
            self._left_out.append(_corrupt(key, exc))
            return
        # It may be deleted since its page was read.
        is_out = rows is not None and rows.incomplete and not self._options.include_incomplete
        why = Why.UNKNOWN if rows is None else why_not(rows.state, is_out)
        if rows is None or why is not None:
            self._left_out.append(LeftOut.of(key, why or Why.UNKNOWN))
            return
        # In a thread, for the loop may have other work; cancelled or not, nothing else touches the file meanwhile.
        adding = asyncio.create_task(asyncio.to_thread(self._decode_and_add, rows))
        try:
            exported, left_out = await asyncio.shield(adding)
        except CorruptEntryError as exc:
            exported, left_out = None, [_corrupt(key, exc)]
        finally:
            await asyncio.wait([adding])
        if exported is not None:
            self._rollouts.append(exported)
        self._left_out += left_out

    def _decode_and_add(self, rows: RolloutRows) -> tuple[Exported | None, list[LeftOut]]:
        with making_sense(rows.key):
            rollout = rows.unpack()
        with saying(self._folder.path):
            return self._writer.add(rollout)

    def _part_is_full(self) -> bool:
        if len(self._left_out) >= _LEFT_OUT_PER_PART or self._writer.size >= self._options.max_bytes:
            return True
        if self._options.format is Format.GYM:
            return len(self._rollouts) >= _GYM_ROLLOUTS_PER_PART
        return self._writer.rows >= self._options.rows_per_file

    async def _finish_part(self, last: RolloutKey) -> None:
        files: tuple[WrittenFile, ...] = ()
        if any(holds_rows(rollout, self._options) for rollout in self._rollouts):
            with saying(self._folder.path):
                self._writer.finish()
            await reach("an export wrote a part under temporary names")
            files = self._folder.publish()
            await reach("an export renamed a part, and did not note it")
        else:
            self._writer.abandon()
        part = Part(files, tuple(self._rollouts), tuple(self._left_out), (last.run, last.rollout_id))
        self._folder.note(part)
        self._parts.append(part)
        await reach("an export noted a part")


def _corrupt(key: RolloutKey, exc: CorruptEntryError) -> LeftOut:
    return LeftOut.of(key, Why.CORRUPT, detail=str(exc)[:500])


def _files(manifest: dict[str, Any]) -> list[WrittenFile]:
    return [WrittenFile(**each) for part in manifest["parts"] for each in part["files"]]


def _identity(url: DatabaseUrl) -> str:
    """Return what tells the database from others, without its password."""
    return identity_of(url) or (url.dsn if url.is_sqlite else url.display)


async def _hand_over(
    marks: ExportMarks,
    folder: ExportFolder,
    report: ExportReport,
    rollouts: Sequence[Exported],
    retire: bool,
    watch: Watch,
) -> None:
    await reach("an export wrote its manifest, and marked nothing")
    manifest = folder.manifest()
    if manifest is None or manifest[1] != report.manifest_sha256:
        raise ExportError(
            f"the manifest in {folder.path} changed while it was read; run the same command again"
        )
    listed = sum(len(part["rollouts"]) for part in manifest[0]["parts"])
    if listed != len(rollouts) or listed != report.rollouts:
        raise ExportError(
            f"the manifest in {folder.path} lists {listed} rollouts, and counts {report.rollouts}"
        )
    await asyncio.to_thread(folder.verify, _files(manifest[0]))
    once = manifest[0]["options"]["unexported"]
    # As somebody in another folder finds it; on which host is in `written_by`.
    found_at = str(folder.path.resolve())
    how = HandOver(report.export_id, found_at, report.manifest_sha256, retire, once)
    with watch("retiring" if retire else "marking", len(rollouts)) as advance:
        report.kept = await marks.hand_over(rollouts, how, advance)
    report.marked = len(rollouts) - sum(not kept.why.is_marked for kept in report.kept)
    report.retired = len(rollouts) - len(report.kept) if retire else 0
