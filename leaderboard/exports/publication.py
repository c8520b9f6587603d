"""Facts about a publication that records do not hold: its name, license and date."""

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime


@dataclass(frozen=True, kw_only=True)
class Publication:
    """Publisher's statements about a board, which no record holds.

    Attributes:
        dataset: ORG/NAME of the data set that publishes the board; ORG is the publisher.
        license: of the published board, by its SPDX name.
        at: time of the export.
        url: address at which the board's site is published, to which rows of citations are relative.
    """

    dataset: str | None = None
    license: str | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    url: str | None = None

    def __post_init__(self) -> None:
        name = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
        if self.dataset is not None and not re.fullmatch(f"{name}/{name}", self.dataset):
            raise ValueError(f"dataset must be ORG/NAME of letters, digits, '_', '.' and '-', got {self.dataset!r}")
        if self.license is not None and not re.fullmatch(r"[A-Za-z0-9.+-]{1,64}", self.license):
            raise ValueError(f"license must be an SPDX name such as CC-BY-4.0, got {self.license!r}")
        # No query, fragment or escape: the address stands in BibTeX, where % and # have a meaning.
        host = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)+(?::\d{1,5})?"
        if self.url is not None and not (
            len(self.url) <= 300 and re.fullmatch(rf"https://{host}(?:/[A-Za-z0-9._~-]+)*/?", self.url)
        ):
            raise ValueError(
                "url must be an address such as https://example.org/board, without query, fragment or escapes, "
                f"got {self.url!r}"
            )

    def needed_dataset(self, format_: str) -> str:
        """Returns the data set's name.

        Args:
            format_: that needs it, for the message.

        Raises:
            ValueError: it was not given.
        """
        if self.dataset is None:
            raise ValueError(f"format {format_} names the data set that publishes the board: add --dataset ORG/NAME")
        return self.dataset

    @property
    def organization(self) -> str | None:
        """ORG of the data set; None without a data set."""
        return self.dataset and self.dataset.partition("/")[0]
