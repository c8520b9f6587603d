"""A site of records."""

from leakbench.leaderboard.board.identity import row_id
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.site.site import Guide, Site, SiteRow
from leakbench.leaderboard.submissions.tiers import tier_of

from ..conftest import complete


def front_site(*records, guide=None, **fields):
    """A site of complete records without submissions."""
    board = Board.from_records(records, complete(*records))
    rows = tuple(SiteRow(id=row_id(row), row=row, tier=tier_of(row.flags)) for row in board.rows)
    return Site(board=board, rows=rows, folders={}, guide=guide or Guide(), publication=Publication(), **fields)
