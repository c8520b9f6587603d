"""Table of metrics: name, kind of result, direction, range, unit and place on the board of each number.

Scorers, records, boards, pages and suite files read it, so a new metric is a row here and the scorer that computes it.
Records may hold metrics of other names: these are not checked, get no column, and cannot be a paper's figure. Standard
library only.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .kinds import KINDS
from .records.details import AucDetail, ChoiceDetail, CountDetail, Detail, GainDetail, ProvedDetail

Better = Literal["higher", "lower"]
"""Direction that is good for the defender."""

CLAIM = "claim"
"""Replaces the kind for epsilon, which is no measurement: it is in the claim of every record of a training."""


@dataclass(frozen=True, kw_only=True)
class BoardColumn:
    """Column of the board.

    Attributes:
        key: unique among all columns, including those that are no metric ("defense", "rank", "epsilon", "attack", ...).
        field: name in CSV and JSON; the key where empty.
        variant: value of `task.noise` of the records that it covers; None for all.
        header: lines of its header in text, Markdown and LaTeX; empty for a column of CSV and JSON alone.
        digits: decimals in those formats, which have to fit a terminal.
        optional: whether it is left out unless a row has a value.
        title: of the page's column; the joined header where empty.
        unit: after that title, in small print.
        hint: tooltip of that title.
    """

    key: str
    field: str = ""
    variant: str | None = None
    header: tuple[str, ...] = ()
    digits: int = 2
    optional: bool = False
    title: str = ""
    unit: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Baseline that a guess without any attack reaches, measured in the same record.

    Attributes:
        metric: name of the metric that measures it.
        of: source of the guess, as "the mean public image".
        margin: in the metric's unit; a positive control must gain more on average, and a single seed of a negative
            control may gain that much by chance.
    """

    metric: str
    of: str
    margin: float


@dataclass(frozen=True, kw_only=True)
class KnownMetric:
    """Properties of a metric.

    Attributes:
        name: in records, suite files and CSV.
        kind: of the records that have it, or `CLAIM`.
        label: for a reader.
        short: abbreviated label for running text; the label where empty.
        unit: of its values; empty for fractions and counts.
        better: direction that is good for the defender.
        least: lower end of its range.
        most: upper end of its range.
        digits: decimals, on the page and in sentences.
        saturates: value that stands for itself and everything beyond, shown as "≥120.0"; None without such a value.
        chance: value of an attack without information; None if that is no single number.
        floor: replaces `chance` if the baseline differs between records.
        over_attacks: "worst" for the extreme over the attacks tried; "leading" for a floor or a bound, which is taken
            from the attack that is worst by the kind's main metric.
        columns: of the board; empty for a metric that appears only in JSON and the page's details.
        scale: ends of the strip that draws a value and its interval on the page; values beyond them extend it.
        reported: whether papers report it, so that a paper's figure can be shown next to ours.
        pictured: whether it is shown with the pictures of an attack.
        in_violations: whether the sentence about a refuted claim states it.
        detail: type of the facts beside a value.
        proved: whether each value is a lower bound with its own confidence. The least of several runs is then a lower
            bound too; their mean is not.
    """

    name: str
    kind: str
    label: str
    short: str = ""
    unit: str = ""
    better: Better
    least: float = 0.0
    most: float = 1.0
    digits: int = 3
    saturates: float | None = None
    chance: float | None = None
    floor: Floor | None = None
    over_attacks: Literal["worst", "leading"] = "worst"
    columns: tuple[BoardColumn, ...] = ()
    scale: tuple[float, float] = (0.0, 1.0)
    reported: bool = True
    pictured: bool = False
    in_violations: bool = False
    detail: type[Detail] = Detail
    proved: bool = False

    @property
    def title(self) -> str:
        """Label and unit, as "PSNR, dB"."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    @property
    def name_in_notes(self) -> str:
        """The short name, else the label."""
        return self.short or self.label

    @property
    def of_attack(self) -> bool:
        """True if an attack has it, and not the training or its claim."""
        return self.kind != CLAIM and KINDS[self.kind].attacked

    @property
    def leak_sign(self) -> int:
        """1 if larger values leak more, else -1."""
        return 1 if self.better == "lower" else -1

    def clip(self, value: float) -> float:
        """Clamps the value to the metric's range."""
        return min(max(value, self.least), self.most)

    def number(self, value: float, digits: int | None = None) -> str:
        """Formats the value, as "7.7", or as "≥120.0" if it saturates; a proved bound is rounded down.

        Args:
            value: number to format.
            digits: decimals; the metric's own where None.
        """
        decimals = self.digits if digits is None else digits
        if self.proved:
            # A lower bound must not be shown as more than it is.
            value = math.floor(value * 10**decimals + 1e-9) / 10**decimals
        words = f"{value:.{decimals}f}"
        return f"≥{words}" if self.saturates is not None and value >= self.saturates else words

    def words(self, value: float) -> str:
        """Formats the value with its unit, as "7.7 dB"."""
        return self.with_unit(self.number(value))

    def with_unit(self, words: str) -> str:
        """Appends the unit to a formatted number."""
        return f"{words} {self.unit}" if self.unit else words


_TABLE = (
    KnownMetric(
        # Strips start at 0.9: on [0, 1], models that differ by a point look alike. Lower values move the end.
        name="accuracy", kind="utility", label="accuracy", detail=CountDetail, better="higher", scale=(0.9, 1.0),
        columns=(
            BoardColumn(
                key="accuracy", header=("accuracy",), title="Accuracy", hint="On held-out data; higher is more useful."
            ),
        ),
    ),
    KnownMetric(name="loss", kind="utility", label="loss", unit="nats", better="lower", most=math.inf),
    KnownMetric(
        # No column: it describes the training, not its quality. `better` has no meaning here and is a required field.
        name="successive_cosine", kind="utility", label="cosine of successive updates", short="cosine",
        better="higher", least=-1.0, scale=(-0.1, 1.0),
    ),
    # Test examples in the class histogram of each client's own, for federated trainings.
    KnownMetric(
        name="worst_client_accuracy", kind="utility", label="accuracy of the worst client", better="higher",
        columns=(
            BoardColumn(
                key="worst_client_accuracy", header=("worst", "client"), optional=True, title="Worst client",
                unit="accuracy", hint="Accuracy on test images in the classes of the client that has the least.",
            ),
        ),
    ),
    KnownMetric(
        name="client_accuracy_std", kind="utility", label="standard deviation of accuracy over clients", better="lower"
    ),
    KnownMetric(
        name="bytes_up", kind="federation", label="sent by a client in a round", short="sent", unit="bytes",
        better="lower", most=math.inf, digits=0,
        columns=(
            BoardColumn(
                key="bytes_up", header=("bytes up", "a round"), digits=0, optional=True, title="Bytes up",
                unit="a client and round", hint="Mean size of a message to the server.",
            ),
        ),
    ),
    KnownMetric(
        name="bytes_down", kind="federation", label="received by a client in a round", short="received", unit="bytes",
        better="lower", most=math.inf, digits=0,
        columns=(BoardColumn(key="bytes_down", digits=0),),
    ),
    KnownMetric(
        name="epsilon_worst", kind="federation", label="largest ε of a client", better="lower", most=math.inf, digits=2,
        reported=False,
    ),
    KnownMetric(
        name="epsilon_median", kind="federation", label="median ε over clients", better="lower", most=math.inf,
        digits=2, reported=False, columns=(BoardColumn(key="epsilon_median"),),
    ),
    KnownMetric(
        name="client_rounds", kind="federation", label="rounds of a client", better="lower", most=math.inf, digits=1,
        reported=False,
    ),
    KnownMetric(
        name="round_accuracy", kind="rounds", label="mean accuracy over rounds", short="mean accuracy",
        better="higher",
        columns=(
            BoardColumn(
                key="round_accuracy", header=("mean over", "rounds"), optional=True, title="Mean over rounds",
                unit="accuracy", hint="Accuracy of the global model, averaged over all rounds.",
            ),
        ),
    ),
    KnownMetric(
        # No chance level, and no direction that is good by itself: the spread of the clients' updates around their
        # mean, over its square. `better` is a required field.
        name="relative_drift", kind="rounds", label="relative drift of the clients' updates", short="drift",
        better="lower", most=math.inf,
    ),
    KnownMetric(name="epsilon", kind=CLAIM, label="claimed ε", better="lower", most=math.inf, digits=2),
    KnownMetric(
        # The strip begins below chance, because an attack without power lands there in half of all runs.
        name="auc", kind="membership", label="AUC", better="lower", chance=0.5, scale=(0.4, 1.0),
        in_violations=True, detail=AucDetail,
        columns=(
            BoardColumn(
                key="auc", header=("worst", "AUC"), title="Worst AUC",
                hint="Of the strongest membership attack; 0.5 is chance, 1 tells all.",
            ),
        ),
    ),
    KnownMetric(
        # Chance is the rate itself: a random guess flags members and non-members alike.
        name="tpr_at_1pct_fpr", kind="membership", label="TPR at 1 % FPR", short="TPR", better="lower", chance=0.01,
        scale=(0.0, 0.1), in_violations=True,
        columns=(
            BoardColumn(
                key="tpr", field="tpr_at_1pct_fpr", header=("worst", "TPR@1%FPR"), digits=3, title="Worst TPR",
                unit="at 1 % FPR", hint="Members found at one false alarm in a hundred; chance is 0.01.",
            ),
        ),
    ),
    KnownMetric(
        # No column: a false positive rate of 0.1 % takes 1,000 non-members, more than `digits` and `photos` have.
        name="tpr_at_0.1pct_fpr", kind="membership", label="TPR at 0.1 % FPR", better="lower", chance=0.001,
        scale=(0.0, 0.1),
    ),
    # TPR - FPR at a threshold chosen on other candidates, so chance gives negative values as well.
    KnownMetric(name="advantage", kind="membership", label="advantage", better="lower", least=-1.0, chance=0.0),
    KnownMetric(
        name="balanced_accuracy", kind="membership", label="balanced accuracy", better="lower", chance=0.5,
        scale=(0.4, 1.0),
    ),
    KnownMetric(
        name="implied_epsilon", kind="membership", label="implied ε", better="lower", most=math.inf, chance=0.0,
        reported=False,
    ),
    KnownMetric(
        name="epsilon_lower", kind="membership", label="proved lower bound of ε", better="lower", most=math.inf,
        chance=0.0, reported=False, detail=ProvedDetail, proved=True,
    ),
    KnownMetric(
        name="psnr", kind="reconstruction", label="PSNR", unit="dB", better="lower", most=120.0, digits=1,
        # 3 dB is half the error of the mean public image.
        floor=Floor(metric="psnr_floor", of="the mean public image", margin=3.0), pictured=True, saturates=120.0,
        columns=(
            BoardColumn(
                key="psnr_free", field="psnr_without_noise", variant="none", header=("PSNR, dB,", "no noise"), digits=1,
                title="PSNR", unit="no noise, dB",
                hint="Of images found in one update without its noise; higher leaks more.",
            ),
            BoardColumn(
                key="psnr_noisy", field="psnr_with_noise", variant="calibrated", header=("PSNR, dB,", "with noise"),
                digits=1, title="PSNR", unit="with noise, dB",
                hint="Of images found in one update as it is released; higher leaks more.",
            ),
        ),
    ),
    KnownMetric(
        name="psnr_floor", kind="reconstruction", label="PSNR of the mean public image", unit="dB", better="lower",
        most=math.inf, digits=1, over_attacks="leading", reported=False, saturates=120.0,
        columns=(BoardColumn(key="floor", field="psnr_floor", digits=1),),
    ),
    KnownMetric(
        # Best match for each image among as many public images as the attack had restarts.
        name="psnr_match", kind="reconstruction", label="PSNR of the best public match", unit="dB", better="lower",
        most=math.inf, digits=1, over_attacks="leading", reported=False, saturates=120.0,
    ),
    # Differences are paired by image. A leak exceeds both floors, so the board reports them in a sentence for each
    # defense, not in a column.
    KnownMetric(
        name="gain_over_mean", kind="reconstruction", label="PSNR gained over the mean public image", unit="dB",
        detail=GainDetail, better="lower", least=-math.inf, most=math.inf, digits=1, chance=0.0, reported=False,
    ),
    KnownMetric(
        name="gain_over_match", kind="reconstruction", label="PSNR gained over the best public match", unit="dB",
        detail=GainDetail, better="lower", least=-math.inf, most=math.inf, digits=1, chance=0.0, reported=False,
    ),
    KnownMetric(
        name="leak", kind="reconstruction", label="better than both floors", better="lower", digits=2,
        reported=False,
    ),
    # Directions are the defender's: a large error of a reconstruction is good.
    KnownMetric(
        # Computed on reconstructions as the attack returned them: clamping would lower the error.
        name="mse_raw", kind="reconstruction", label="MSE, not clamped", better="higher", most=math.inf, digits=4,
    ),
    KnownMetric(name="mse", kind="reconstruction", label="MSE", better="higher", most=math.inf, digits=4),
    # Negative if patches are anticorrelated.
    KnownMetric(name="ssim", kind="reconstruction", label="SSIM", better="lower", least=-1.0, pictured=True),
    KnownMetric(
        # No upper end: feature distances add up over the layers of a network.
        name="lpips", kind="reconstruction", label="LPIPS", better="higher", most=math.inf, pictured=True
    ),
    KnownMetric(
        name="label_accuracy", kind="reconstruction", label="labels", better="lower", digits=2, pictured=True
    ),
    KnownMetric(
        # Image identifiability (Yin et al., CVPR 2021). Chance is 1 / number of images compared, in the detail.
        name="iip", kind="reconstruction", label="identified", better="lower", digits=2, pictured=True,
    ),
    KnownMetric(
        # For attackers who are given candidates. Chance is 1 / n, which is in the metric's detail.
        name="prior_success", kind="reconstruction", label="picked right", better="lower", digits=2,
        in_violations=True, detail=ChoiceDetail,
        columns=(
            BoardColumn(
                key="prior_free", field="prior_success_without_noise", variant="none",
                header=("picked,", "no noise"), optional=True, title="Picked right", unit="no noise",
                hint="Share of images picked out of a prior's candidates by one update without its noise.",
            ),
            BoardColumn(
                key="prior_noisy", field="prior_success_with_noise", variant="calibrated",
                header=("picked,", "with noise"), optional=True, title="Picked right", unit="with noise",
                hint="Share of images picked out of a prior's candidates by one update as it is released.",
            ),
        ),
    ),
    KnownMetric(
        # Largest success that the claim allows any attack with as many candidates, from the executed steps.
        name="rero_bound", kind="reconstruction", label="identified at most", better="lower", digits=2,
        over_attacks="leading", reported=False, pictured=True, in_violations=True,
    ),
    KnownMetric(name="coverage", kind="reconstruction", label="pixels decided", better="lower", pictured=True),
    KnownMetric(name="certified", kind="reconstruction", label="images proved", better="lower", pictured=True),
    KnownMetric(
        # Loss that the attack minimised: unit and range are the attack's, so only its restarts can be compared.
        name="objective", kind="reconstruction", label="objective", better="higher", least=-math.inf, most=math.inf,
        reported=False,
    ),
    KnownMetric(
        name="label_overlap", kind="labels", label="labels named", better="lower", digits=2,
        # Labels of a batch as a multiset. In CSV and JSON; the page shows it in an attack's details.
        floor=Floor(metric="label_overlap_floor", of="a guess by class frequency", margin=0.2),
        columns=(
            BoardColumn(key="labels_free", field="labels_without_noise", variant="none"),
            BoardColumn(key="labels_noisy", field="labels_with_noise", variant="calibrated"),
        ),
    ),
    KnownMetric(
        name="label_overlap_floor", kind="labels", label="labels named by class frequency alone",
        better="lower", digits=2, over_attacks="leading", reported=False,
        columns=(BoardColumn(key="labels_floor", field="label_overlap_floor"),),
    ),
    KnownMetric(
        name="label_exact", kind="labels", label="batches whose labels are all named", better="lower", digits=2
    ),
    KnownMetric(
        # No claim for records bounds it. Optional column: left out unless a suite attacks clients.
        name="classes_named", kind="client_property", label="clients' classes named", short="classes named",
        better="lower", digits=2, reported=False,
        floor=Floor(metric="classes_named_floor", of="a guess by class frequency", margin=0.2),
        columns=(
            BoardColumn(
                key="classes_named", header=("classes", "named"), optional=True, title="Classes named",
                unit="by messages", hint="Share of clients whose most frequent class their messages give away.",
            ),
        ),
    ),
    KnownMetric(
        name="classes_named_floor", kind="client_property", label="clients' classes named by class frequency alone",
        better="lower", digits=2, over_attacks="leading", reported=False,
        columns=(BoardColumn(key="classes_floor", field="classes_named_floor"),),
    ),
    KnownMetric(
        # Optional column: left out if no suite inserts canaries.
        name="canary_epsilon", kind="canaries", label="ε proved by canaries", short="canaries", better="lower",
        most=math.inf, digits=2, chance=0.0, reported=False, in_violations=True, detail=ProvedDetail, proved=True,
        columns=(
            BoardColumn(
                key="canary_epsilon", header=("ε by", "canaries"), optional=True, title="ε at least",
                unit="by canaries", hint="What canaries prove with confidence 0.95, the least of several seeds.",
            ),
        ),
    ),
)  # fmt: skip

METRICS = {metric.name: metric for metric in _TABLE}
"""Name -> metric, in the order in which a kind's metrics are shown. Read at the place of use, never copied at import,
so that a row added while a program runs is seen everywhere."""


def reported() -> tuple[str, ...]:
    """Returns the names that a paper's figure can have."""
    return tuple(metric.name for metric in METRICS.values() if metric.reported)


def columns(*, written: bool = False) -> Iterator[tuple[KnownMetric, BoardColumn]]:
    """Yields the metrics' columns of the board, by kind and in their order.

    Args:
        written: only columns shown in text and on the page, without optional columns and those of CSV and JSON alone.
    """
    for kind in KINDS.values():
        for metric in METRICS.values():
            if metric.kind == kind.name:
                yield from (
                    (metric, column)
                    for column in metric.columns
                    if not written or (column.header and not column.optional)
                )
