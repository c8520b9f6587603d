"""A site of records."""

from leakbench.leaderboard.board.identity import row_id
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.site.site import Guide, Site, SiteRow, SubmissionOnSite
from leakbench.leaderboard.submissions.rows import beside
from leakbench.leaderboard.submissions.tiers import tier_of

from ..conftest import complete
from ..submissions.declarations import declaration


def front_site(*records, guide=None, **fields):
    """A site of complete records without submissions."""
    board = Board.from_records(records, complete(*records))
    rows = tuple(SiteRow(id=row_id(row), row=row, tier=tier_of(row.flags)) for row in board.rows)
    return Site(board=board, rows=rows, folders={}, guide=guide or Guide(), publication=Publication(), **fields)


def beside_site(published, named, guide=None):
    """A site of a published board and of a submission by `eve`."""
    board = beside(published, {"eve/1": named})
    submission = SubmissionOnSite(
        handle="eve", digest="d" * 64, declaration=declaration(handle="eve"), tier=tier_of(())
    )
    rows = tuple(
        SiteRow(
            id=row_id(row), row=row, tier=tier_of(row.flags),
            submission=submission if row.defense.name.startswith("eve/") else None,
        )
        for row in board.rows
    )  # fmt: skip
    return Site(board=board, rows=rows, folders={}, guide=guide or Guide(), publication=Publication())
