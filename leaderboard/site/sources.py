"""Results from which a site is made: all records below some folders, with their manifests and tunings."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..board.table import Board
from ..page.certificates import Certificate, certificate
from ..page.papers import PaperExplanation, read_explanations
from ..page.remarks import Tuning, tunings
from ..records.files import refuse_links
from ..records.folder import ArraysKey, Completeness, Folder, ScoreCheck, arrays_key, read_folder
from ..records.manifest import Manifest
from ..records.record import Record
from ..submissions.rows import NamedRecords, beside


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Records of a site.

    Attributes:
        records: of all folders.
        folders: folder of a record's arrays, by `arrays_key`.
        manifests: of all folders.
        outputs: folder above each `records/`, which may hold tunings, a self-test and explanations.
        submitted: path of a submission -> its records, which are ranked among themselves.
    """

    records: tuple[Record, ...]
    folders: Mapping[ArraysKey, Path]
    manifests: tuple[Manifest, ...]
    outputs: tuple[Path, ...]
    submitted: Mapping[str, NamedRecords] = field(default_factory=dict)

    @property
    def everything(self) -> tuple[Record, ...]:
        """Records of all folders and submissions."""
        return (*self.records, *(record for named in self.submitted.values() for record in named.records))

    @property
    def board(self) -> Board:
        """Board of everything.

        Raises:
            BoardError: the records do not form a board.
        """
        # A suite may have records of submissions alone.
        published = Board.from_records(self.records, self.complete) if self.records or not self.submitted else None
        return beside(published, self.submitted) if published is None or self.submitted else published

    @property
    def complete(self) -> Completeness:
        """Manifests of all folders; results are named without a path of this machine."""
        return Completeness(self.manifests)

    def of_suite(self, suite: str) -> "Sources":
        """Returns the records and manifests of one suite."""
        records = tuple(record for record in self.records if record.suite == suite)
        own = {self.folders[arrays_key(record)] for record in records}
        submitted = {
            path: NamedRecords(
                tuple(record for record in named.records if record.suite == suite),
                tuple(manifest for manifest in named.manifests if manifest.suite == suite),
            )
            for path, named in self.submitted.items()
        }
        return Sources(
            records=records,
            folders=self.folders,
            manifests=tuple(manifest for manifest in self.manifests if manifest.suite == suite),
            outputs=tuple(dict.fromkeys(path.parent for path in sorted(own) if path.parent in self.outputs)),
            submitted={path: named for path, named in submitted.items() if named.records},
        )

    def with_submissions(self, submitted: Mapping[str, NamedRecords], folders: Mapping[ArraysKey, Path]) -> "Sources":
        """Returns these sources with the records of submissions.

        Args:
            submitted: of `submissions.rows.named_records`.
            folders: of their arrays, by `arrays_key`.
        """
        return replace(self, submitted=submitted, folders={**folders, **self.folders})

    def explanations(self) -> tuple[PaperExplanation, ...]:
        """Sentences of the publisher on differences from papers' figures."""
        return read_explanations(self.outputs)

    def tunings(self) -> list[Tuning]:
        """Searches for settings on which the records depend."""
        return [tuning for output in self.outputs for tuning in tunings(output, self.records)]

    def selftest(self) -> Certificate | None:
        """Self-test of the first folder that has one; None without."""
        return next(filter(None, map(certificate, self.outputs)), None)


def read_sources(results: Sequence[Path], verify: ScoreCheck | None = None) -> Sources:
    """Reads every folder of records in some results.

    Args:
        results: outputs of runs, folders of records, or folders with `records/` at any depth.
        verify: compares a record's numbers with those recomputed from its scores; None to skip that.

    Raises:
        RecordError: as `read_folder`, also for results without any record.
    """
    paths = dict.fromkeys(path for folder in results for path in _records_folders(folder))
    folders = [read_folder(path, verify) for path in paths]
    return Sources(
        records=tuple(record for folder in folders for record in folder.records),
        folders={arrays_key(record): folder.path for folder in folders for record in folder.records},
        manifests=tuple(manifest for folder in folders for manifest in folder.complete.manifests or ()),
        outputs=tuple(_outputs(folders)),
    )


def _outputs(folders: Iterable[Folder]) -> Iterable[Path]:
    return (folder.path.parent for folder in folders if folder.path.name == "records")


def _records_folders(results: Path) -> list[Path]:
    """Folders of records: `results` itself if it has records, else every `records` below it, not behind links."""
    refuse_links(results / "records")
    if (results / "records").is_dir() or any(results.glob("*.json")):
        return [results]
    below = [
        Path(parent) / "records"
        for parent, names, _ in os.walk(results, followlinks=False)
        if "records" in names and not (Path(parent) / "records").is_symlink()
    ]
    # Without any, `read_folder` has the sentence for it.
    return sorted(below) or [results]
