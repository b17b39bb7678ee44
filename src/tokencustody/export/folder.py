"""The folder that an export fills: files that are whole or not there, how far it came, and last the manifest.

A part is a file, or several, that are finished together: written under temporary names, synced, announced in the
progress file with their hashes, renamed, and only then noted there as finished. What is not noted is written again by
the next run, which removes what was announced and nothing else. The manifest takes the place of the progress file when
all parts are there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from tokencustody.database.folders import make_folder, sync_folder
from tokencustody.errors import ExportError
from tokencustody.export.report import Part, WrittenFile

# Underscores: readers of whole folders (pandas, pyarrow, Spark) take every other file for a part.
MANIFEST = "_manifest.json"
PROGRESS = "_progress.jsonl"
# Their names in folders of before.
_OLD_MANIFEST = "manifest.json"
_OLD_PROGRESS = "progress.jsonl"
_TEMPORARY = ".partial"
_TEMPORARY_NAME = re.compile(rf"\.\d{{5,}}{re.escape(_TEMPORARY)}")
# What readers pass over: hidden files, and the empty locks that Gym makes beside its token files.
_NO_DATA = re.compile(r"[._].*|.+\.tokens\.lock", re.DOTALL)


class ExportFolder:
    """One export's folder, made if need be and locked against another export while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ours: list[Path] = []
        self._written: list[tuple[Path, str, int]] = []
        # What a run before was about to name, and did not note as finished.
        self._announced: list[WrittenFile] = []

    @property
    def is_begun(self) -> bool:
        """Whether an export was begun or finished here."""
        return self._manifest_path.exists() or self._progress_path.exists()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder. Raises ExportError when another process does, or when it cannot be made or written."""
        with saying(self.path):
            self._ours = [path for path in (self.path, *self.path.absolute().parents) if not path.exists()]
            if self.is_begun:
                self._ours = [self.path]
            make_folder(self.path)
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with saying(self.path):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            for temporary, _, _ in self._written:
                temporary.unlink(missing_ok=True)
            os.close(descriptor)

    def manifest(self) -> tuple[dict[str, Any], str] | None:
        """Return the manifest and the SHA-256 of its bytes, if the export is finished."""
        path = self._manifest_path
        with saying(path):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
        return _object(data, path), hashlib.sha256(data).hexdigest()

    def progress(self) -> tuple[dict[str, Any], list[Part]] | None:
        """Return the header of an export that is not finished, and its finished parts; forget a torn last line.

        Raises ExportError for a folder that holds anything else.
        """
        progress = self._progress_path
        with saying(progress):
            if not progress.exists():
                self.check_alone(())
                return None
            data = progress.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                os.truncate(progress, len(whole))
        if not whole:
            return None
        header, *lines = (_object(line, progress) for line in whole.splitlines())
        self._announced = [WrittenFile(**file) for line in lines for file in line.get("announced", ())]
        return header, [Part.read(line) for line in lines if "announced" not in line]

    def check_alone(self, files: Iterable[WrittenFile]) -> None:
        """Raise ExportError that names a file beside these, if a reader of the folder would take it for a part."""
        expected = {file.name for file in files} | {self._manifest_path.name, self._progress_path.name}
        with saying(self.path):
            others = sorted({path.name for path in self.path.iterdir()} - expected)
        for name in others:
            if not _NO_DATA.fullmatch(name):
                raise ExportError(
                    f"{self.path} holds other files: {name!r} is not of this export, and a reader of the folder would "
                    "take it for a part; nothing was retired or marked. Move it away, or name a new folder"
                )

    def begin(self, header: dict[str, Any]) -> None:
        """Note what is about to be exported."""
        self._note(header)

    def remove_unfinished(self, parts: Iterable[Part]) -> None:
        """Remove what an export wrote and did not finish: temporary files, and what it announced after these parts.

        A file that is not byte for byte what was announced is somebody else's, and stays.
        """
        finished = {file.name for part in parts for file in part.files}
        with saying(self.path):
            for path in list(self.path.iterdir()):
                if _TEMPORARY_NAME.fullmatch(path.name):
                    path.unlink()
            for file in self._announced:
                path = self.path / file.name
                if (
                    file.name not in finished
                    and path.is_file()
                    and _measured(path) == (file.bytes, file.sha256)
                ):
                    path.unlink()

    @contextmanager
    def writing(self, name: str, *, rows: int) -> Iterator[BinaryIO]:
        """Write a file of the part at hand under a temporary name; it is synced at the end."""
        with saying(self.path / name):
            stream = self.open_temporary()
            try:
                yield stream
                self.close_temporary(stream, name, rows=rows)
            finally:
                self.discard(stream)

    def open_temporary(self) -> BinaryIO:
        """Return a new file under a temporary name."""
        with saying(self.path):
            return open(self.path / f".{len(self._written):05}{_TEMPORARY}", "wb", opener=_private)

    def close_temporary(self, stream: BinaryIO, name: str, *, rows: int) -> None:
        """Sync a file that `open_temporary` gave, which will have this name."""
        with saying(self.path / name):
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
            self._written.append((Path(stream.name), name, rows))

    def discard(self, stream: BinaryIO) -> None:
        """Remove a file that `open_temporary` gave and that is not closed, if it is there."""
        if not stream.closed:
            # A full disk also refuses what is still in the buffer.
            with contextlib.suppress(OSError):
                stream.close()
            Path(stream.name).unlink(missing_ok=True)

    def publish(self) -> tuple[WrittenFile, ...]:
        """Give the files of the part their names, durably, and return them."""
        files = []
        for temporary, name, rows in self._written:
            with saying(self.path / name):
                files.append(WrittenFile(name, rows, *_measured(temporary)))
        self._note({"announced": [asdict(file) for file in files]})
        self._rename()
        return tuple(files)

    def _rename(self) -> None:
        for temporary, name, _ in self._written:
            with saying(self.path / name):
                temporary.replace(self.path / name)
        self._written.clear()
        self._sync()

    def note(self, part: Part) -> None:
        """Note durably that a part is finished."""
        self._note(asdict(part))

    def finish(self, manifest: dict[str, Any]) -> str:
        """Write the manifest, remove the progress file, and return the manifest's SHA-256."""
        data = json.dumps(manifest, indent=1).encode() + b"\n"
        with self.writing(MANIFEST, rows=0) as stream:
            stream.write(data)
        self._rename()
        self.remove_progress()
        return hashlib.sha256(data).hexdigest()

    def remove_progress(self) -> None:
        """Remove the progress file of a finished export, if it is still there."""
        path = self._progress_path
        with saying(path):
            path.unlink(missing_ok=True)
        self._sync()

    def vanish(self) -> None:
        """Remove what an export without a row has left here: its progress, and the folders that were made for it."""
        self.remove_unfinished(())
        self.remove_progress()
        # Only what is empty goes.
        with contextlib.suppress(OSError):
            for path in self._ours:
                path.rmdir()

    def verify(self, files: Iterable[WrittenFile]) -> None:
        """Raise ExportError that names a file that the manifest does not list, or one that is not as it lists it."""
        files = list(files)
        self.check_alone(files)
        for file in files:
            path = self.path / file.name
            remedy = "nothing was retired or marked. Restore the file, or export into a new folder"
            with saying(path):
                try:
                    found = _measured(path)
                except FileNotFoundError:
                    raise ExportError(
                        f"{path} is not there, and {self._manifest_path.name} lists it; {remedy}"
                    ) from None
            if found != (file.bytes, file.sha256):
                raise ExportError(
                    f"{path} is not the file that {self._manifest_path.name} lists: its bytes differ; {remedy}"
                )

    def _note(self, document: dict[str, Any]) -> None:
        path = self._progress_path
        with saying(path), open(path, "ab", opener=_private) as stream:
            stream.write(json.dumps(document).encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._sync()

    @property
    def _manifest_path(self) -> Path:
        return self._named(MANIFEST, _OLD_MANIFEST)

    @property
    def _progress_path(self) -> Path:
        return self._named(PROGRESS, _OLD_PROGRESS)

    def _named(self, name: str, old: str) -> Path:
        path = self.path / name
        return self.path / old if not path.exists() and (self.path / old).exists() else path

    def _sync(self) -> None:
        sync_folder(self.path)


def _object(data: bytes, path: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        document = json.loads(data)
        if isinstance(document, dict) and document.keys() & {"export_id", "announced", "after"}:
            return dict(document)
    raise ExportError(f"{path} is not what an export wrote; name a new folder")


def _measured(path: Path) -> tuple[int, str]:
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return stream.tell(), sha256


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def saying(path: Path) -> Iterator[None]:
    """Say of which file the operating system complains."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.EWOULDBLOCK, errno.EACCES) and isinstance(exc, BlockingIOError):
            raise ExportError(
                f"another export is writing to {path}; wait for it, or name another folder"
            ) from None
        raise ExportError(f"{path}: {exc.strerror or exc}") from exc
