"""Exact recovery of a whole batch from the gradient of a linear layer with a ReLU, and its certificate.

Candidates for the directions of D's columns come from `sparse_columns`. The bias gradient is the sum of the columns,
which gives their lengths, and the gradient D X^T then gives the inputs X. Dimitrov et al., "SPEAR", NeurIPS 2024, whose
score lambda is the share of (neuron, example) pairs in which a neuron is on exactly if its gradient is not zero.

An input is certified only if all of the following hold, which the attacker can verify without the batch: the remainder
of the gradient beyond its rank is rounding; the input lies in the box of valid inputs; and the contribution of this
input under the defense, for some label, clip factor included, equals its part of the factorised sum, up to rounding.
This last condition compares hundreds of numbers without a free parameter, for each input separately: a wrong direction,
a wrong rank or noise changes all of them. "Proved" is up to coincidence: no other batch was seen to give these numbers,
which does not rule out that some batch does. An input whose contribution fits several times is returned as often and
never certified: two similar inputs may have the same sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..targets.observation import Observation
from ..targets.results import Reconstruction
from ..threat_model.attack_errors import NotApplicable, RankDeficient
from ..threat_model.requires import granted
from .input_layer import InputLayer, assembled, images_of, relu_layer, undone
from .least_squares import least_squares
from .low_rank import LowRank, completed, factorised
from .sparse_columns import EXTRA, POOL, SPARSE, DirectionSource, Scales, filled, fitted, independent, merged, scales

MOST_COMPLETED = 64
"""Largest rank tried in completing a gradient of which only some entries are known."""

TOLD = 1e-3
"""Smallest singular value, of the directions restricted to a column's known entries, at which the column counts as
determined: rounding is magnified by the inverse. Entries of inactive neurons are known, and carry no information.
"""

STRICT = 2048
"""Number of draws after which candidates with few zeros are considered, too."""

_AT_ONCE = 2**22  # numbers of a block of candidates and of a block of swaps, 32 MiB each


@dataclass(frozen=True, kw_only=True)
class Unmixed:
    """Factorised gradient, columns @ rows.

    Attributes:
        basis: [b, b], Q of D = left @ Q, unit columns.
        columns: D [m, b].
        rows: X^T [b, n].
        agreement: [b], lambda of each column by itself.
    """

    basis: Tensor
    columns: Tensor
    rows: Tensor
    agreement: Tensor

    @property
    def score(self) -> float:
        """Score lambda."""
        return float(self.agreement.mean())


@dataclass(frozen=True, kw_only=True)
class _KnownPart:
    """Rows and columns of a layer's gradient that the release determines, and their low-rank factorisation."""

    layer: InputLayer
    low_rank: LowRank
    sizes: Scales
    in_rows: Tensor
    in_columns: Tensor

    @property
    def active(self) -> Tensor:
        """Nonzero rows of `left`: neurons that were active for some example."""
        return self.low_rank.left.norm(dim=1) > self.sizes.fine


def recovered_batch(
    target: Observation,
    generator: torch.Generator,
    source: Callable[[Tensor, Tensor], DirectionSource],
    *,
    budget: int,
    block: int | None = None,
) -> Reconstruction:
    """Factorises the gradient of a target's ReLU layer into columns of D and inputs.

    Args:
        target: a shared update; `structure`, `released`, `contributions` and the box are read.
        generator: source of the held-out entries of a completion.
        source: nonzero rows of `left` [m, b], and these neurons' outputs for an average input [m] -> source of
            candidates for columns.
        budget: largest number of candidates.
        block: candidates at a time; by default as many as fit 32 MiB.

    Returns:
        An input for each direction of the gradient, with `certified`. `ok` if the recomputed contribution of each input
        equals its part of the factorised sum, and every pixel is in some patch; lambda = 1 alone would not exclude
        mixtures, such as of two examples with the same active neurons.

    Raises:
        NotApplicable: no such layer, too little of its gradient, patches that do not overlap or were not all found, or
            a gradient that is noise, 0, or of a batch that is not smaller than the layer.
        RankDeficient: without noise, fewer directions were found than the gradient has.
    """
    layer = relu_layer(granted(target.structure)(), target.released, target.expected_batch)
    eps = torch.finfo(target.released.dtype).eps
    known = _known(layer, eps, generator)
    best = _searched(known, source, budget, block, lambda batch: _all_certified(target, known, batch, eps))
    return _result(target, known, best, eps)


def _known(layer: InputLayer, eps: float, generator: torch.Generator) -> _KnownPart:
    in_rows, in_columns = layer.observed.any(dim=1), layer.observed.any(dim=0)
    gradient, observed = layer.gradient[in_rows][:, in_columns], layer.observed[in_rows][:, in_columns]
    if bool(observed.all()):
        low_rank = factorised(gradient, eps)
    else:
        whole = completed(gradient, observed, eps, generator, most=min(MOST_COMPLETED, min(observed.shape) - 1))
        # Rows and columns with fewer entries than directions are not determined by them.
        rows, columns = observed.sum(dim=1) >= whole.rank, observed.sum(dim=0) >= whole.rank
        low_rank = whole.directions(eps, rows, columns)
        if not bool((determined := _determined(low_rank.left, observed[rows][:, columns])).all()):
            columns = _narrowed(columns, determined)
            low_rank = whole.directions(eps, rows, columns)
        in_rows, in_columns = _narrowed(in_rows, rows), _narrowed(in_columns, columns)
    bare = all(operation.kind in ("input", "flatten", "identity") for operation in layer.before)
    if not bool(in_columns.all()) and (layer.settings or not bare):
        raise NotApplicable(
            f"the update must show something of every column of {layer.name}, and it shows too little of "
            f"{int((~in_columns).sum())} of {len(in_columns)}"
        )
    if int((layer.bias_observed & in_rows).sum()) < low_rank.rank:
        raise NotApplicable(
            f"the update must show {low_rank.rank} entries of the bias gradient of {layer.name}, one for each "
            f"direction, and it shows {int((layer.bias_observed & in_rows).sum())}"
        )
    return _KnownPart(layer=layer, low_rank=low_rank, sizes=scales(low_rank), in_rows=in_rows, in_columns=in_columns)


def _determined(left_factor: Tensor, observed: Tensor) -> Tensor:
    """Returns a mask of the columns [n] that their known entries determine: active neurons must span all directions.

    Args:
        left_factor: [m, b], orthonormal columns.
        observed: bool [m, n].
    """
    rank = left_factor.shape[1]
    pairs = (left_factor[:, :, None] * left_factor[:, None]).reshape(len(left_factor), -1)
    systems = (observed.to(left_factor).T @ pairs).view(-1, rank, rank)
    return torch.linalg.eigvalsh(systems)[:, 0] > TOLD**2


def _narrowed(chosen: Tensor, keep: Tensor) -> Tensor:
    """Restricts a mask to those of its chosen entries that `keep` marks."""
    result = chosen.clone()
    result[chosen.nonzero()[:, 0]] = keep
    return result


def _searched(
    known: _KnownPart,
    source: Callable[[Tensor, Tensor], DirectionSource],
    budget: int,
    block: int | None,
    proved: Callable[[Unmixed], bool],
) -> Unmixed:
    """Draws candidates until lambda is 1, all inputs are proved, or the budget is spent."""
    low_rank, sizes = known.low_rank, known.sizes
    left_factor, rank = low_rank.left[known.active], low_rank.rank
    empty = left_factor.new_zeros(0, rank)
    if rank == 1:
        return unmixed(known, left_factor.new_ones(1, 1))
    draw = source(left_factor, _of_average(known)[known.active])
    # The first block has about as many draws as it takes to hit a column, so that small batches end early; later blocks
    # grow.
    fits = _AT_ONCE // (len(left_factor) + rank * rank)
    first = max(64, min(2 ** min(rank, 40), fits))
    least = rank - 1 + max(1, math.ceil(SPARSE * (len(left_factor) - rank + 1)))
    # If most neurons are active for all examples, a column has few zeros; but mixtures of two columns have few, too,
    # and may displace columns.
    relaxed = min(least, rank - 1 + EXTRA) if low_rank.exact else least
    pool, strengths = empty, left_factor.new_zeros(0)
    best, tried, drawn, swaps_at = None, empty, 0, 256
    while drawn < budget:
        count = min(block or max(first, min(drawn // 4, fits)), budget - drawn)
        # Swaps cost as much as many draws, so they are tried after each doubling of the draws, and at the end.
        due = drawn + count >= min(2 * swaps_at, budget)
        drawn += count
        fresh, strong = fitted(left_factor, draw(count), sizes, least if drawn <= STRICT else relaxed)
        pool, strengths = merged(torch.cat([pool, fresh]), torch.cat([strengths, strong]), sizes.same)
        pool, strengths = pool[: POOL * rank + 32], strengths[: POOL * rank + 32]
        chosen = independent(pool, rank, sizes.apart)
        if len(chosen) == rank and (best is None or not torch.equal(pool[chosen].T, tried)):
            tried = pool[chosen].T
            now = unmixed(known, tried)
            best = now if best is None or now.score > best.score else best
        elif not due:
            continue
        if best is not None and due:
            best, swaps_at = swapped(known, best, pool), drawn
        if best is not None and (best.score == 1 or (best.score > 0.9 and proved(best))):
            return best
    chosen = independent(pool, rank, sizes.apart)
    if best is None and low_rank.exact:
        raise RankDeficient(
            f"neurons that are off for some examples must single out the {rank} directions of the gradient, and those "
            f"of {drawn} draws single out {len(chosen)}: too many neurons of {known.layer.name} are on for the whole "
            "batch, or the draws are too few",
            deficit=rank - len(chosen),
        )
    return best or unmixed(known, filled(pool[chosen], rank))


def _of_average(known: _KnownPart) -> Tensor:
    """Returns outputs [m] of the layer for an average x of the batch's inputs, fitted by least squares to G = h x^T."""
    layer, shown = known.layer, known.layer.bias_observed[known.in_rows]
    shared = torch.where(shown, layer.bias_gradient[known.in_rows], 0.0)
    average = (shared @ known.low_rank.left) @ known.low_rank.right / shared.square().sum().clamp(min=1e-300)
    return layer.weight[known.in_rows][:, known.in_columns] @ average + layer.bias[known.in_rows]


def unmixed(known: _KnownPart, basis: Tensor) -> Unmixed:
    """Returns the factorisation in a basis: column lengths, inputs and score."""
    columns, rows, agreement = _solved(known, basis[None])
    return Unmixed(basis=basis, columns=columns[0], rows=rows[0], agreement=agreement[0])


def _solved(known: _KnownPart, bases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns columns [k, m, b], rows [k, b, n] and agreement [k, b] of bases [k, b, b]."""
    layer, low_rank = known.layer, known.low_rank
    plain = low_rank.left @ bases
    shown = layer.bias_observed[known.in_rows]
    target = layer.bias_gradient[known.in_rows][shown]
    lengths = least_squares(plain[:, shown], target[:, None].expand(len(bases), -1, 1))[..., 0]
    # A column of length 0 has no input; a tiny length keeps later results finite.
    lengths = torch.where(lengths.abs() < 1e-200, 1e-200, lengths)
    inverse = torch.linalg.inv(bases)
    rows = (inverse @ low_rank.right) / lengths[..., None]
    weight, bias = layer.weight[known.in_rows], layer.bias[known.in_rows]
    if bool(known.in_columns.all()):
        # W R^T is the same for all bases.
        outputs = (inverse @ (low_rank.right @ weight.T)) / lengths[..., None] + bias
    else:
        outputs = rows @ weight[:, known.in_columns].T + bias
    on = outputs.mT > 0
    agreement = (on == (plain.abs() > known.sizes.fine)).double().mean(dim=1)
    return plain * lengths[:, None], rows, agreement


def swapped(known: _KnownPart, start: Unmixed, pool: Tensor) -> Unmixed:
    """Replaces columns by candidates while lambda increases, in each round by the best of all replacements."""
    best, rank = start, len(start.basis)
    pairs = min(
        len(pool), max(1, _AT_ONCE // (rank * rank * (len(known.low_rank.left) + known.low_rank.right.shape[1])))
    )
    candidates = pool[:pairs]
    # At most one round per column: without noise no replacement is needed if all columns are among the candidates.
    for _ in range(rank):
        if best.score == 1:
            break
        bases = best.basis.expand(rank, len(candidates), rank, rank).clone()
        place = torch.arange(rank, device=pool.device)
        bases[place, :, :, place] = candidates
        bases = bases.reshape(-1, rank, rank)
        regular = torch.linalg.svdvals(bases)[:, -1] > known.sizes.apart
        if not bool(regular.any()):
            break
        bases = bases[regular]
        scores = _solved(known, bases)[2].mean(dim=1)
        if float(scores.max()) <= best.score:
            break
        best = unmixed(known, bases[int(scores.argmax())])
    return best


def _inputs(target: Observation, known: _KnownPart, factors: Unmixed, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns network inputs [k, *input_shape], columns [k, positions, m] and rows [k, positions, n]; float64."""
    layer = known.layer
    full = factors.rows.new_full((len(factors.rows), len(known.in_columns)), (target.input_low + target.input_high) / 2)
    full[:, known.in_columns] = factors.rows
    columns = factors.columns.T
    if layer.positions == 1:
        full, columns = full[:, None], columns[:, None]
    else:
        # Overlapping pixels of an image agree up to the error of the factorisation.
        error = known.low_rank.error * math.sqrt(len(known.low_rank.left))
        tolerance = max(1e-6, 100 * eps, 10 * error) * (target.input_high - target.input_low)
        images = assembled(layer, full, tolerance)
        if not len(images):
            raise NotApplicable(
                f"patches of {layer.name} must fit together to images of {layer.positions}, "
                f"and the {len(full)} that were found do not"
            )
        full, columns = full[images], columns[images]
    return undone(layer, images_of(layer, full)), columns, full


def _verdicts(
    target: Observation, known: _KnownPart, inputs: Tensor, columns: Tensor, rows: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns for each input whether it is proved, whether it explains its part, its label, and its multiplicity."""
    layer, margin = known.layer, 1e-6 * (target.input_high - target.input_low)
    inside = ((inputs >= target.input_low - margin) & (inputs <= target.input_high + margin)).flatten(1).all(dim=1)
    valid = inputs.clamp(target.input_low, target.input_high).nan_to_num().to(target.released)
    observed = layer.observed & known.in_rows[:, None] & known.in_columns
    bias_observed = layer.bias_observed & known.in_rows
    ours = torch.cat(
        [(columns.mT @ rows[..., known.in_columns])[:, observed[known.in_rows][:, known.in_columns]],
         columns.sum(dim=1)[:, bias_observed[known.in_rows]]], dim=1,
    )  # fmt: skip
    size = ours.norm(dim=1).clamp(min=1e-300)
    error, labels, copies = torch.full_like(size, math.inf), torch.zeros_like(size).long(), torch.ones_like(size)
    # A loop over classes bounds memory: a contribution is as long as the release.
    for label in range(target.classes):
        alone = target.contributions(valid, torch.full_like(labels, label))
        of_weight, of_bias = layer.shown(alone)
        theirs = torch.cat([of_weight[:, observed], of_bias[:, bias_observed]], dim=1)
        times = ((ours * theirs).sum(dim=1) / theirs.square().sum(dim=1).clamp(min=1e-300)).round().clamp(min=1)
        off = ((ours - times[:, None] * theirs).norm(dim=1) / size).nan_to_num(nan=math.inf)
        better = off < error
        error, labels = torch.where(better, off, error), torch.where(better, label, labels)
        copies = torch.where(better, times, copies)
    whole = bool(known.in_columns.all()) and _covered(layer)
    fits = (error <= math.sqrt(eps)) & known.low_rank.exact
    # Two copies of an input, or two similar inputs with the same active neurons, have the same sum if the outputs
    # hardly change between them, as in a network that is confident of a wrong class.
    explains = fits & (copies == 1)
    return explains & inside & whole, explains, labels, torch.where(fits & inside & whole, copies.long(), 1)


def _covered(layer: InputLayer) -> bool:
    """Returns whether every pixel is in some patch; the update contains nothing of other pixels."""
    ones = torch.ones(1, *layer.shape, dtype=torch.float64)
    return bool((images_of(layer, layer.unfolded(ones)) == 1).all())


def _all_certified(target: Observation, known: _KnownPart, factors: Unmixed, eps: float) -> bool:
    try:
        inputs, columns, rows = _inputs(target, known, factors, eps)
    except NotApplicable:
        return False
    whole = len(inputs) * known.layer.positions == len(factors.rows)
    return whole and bool(_verdicts(target, known, inputs, columns, rows, eps)[0].all())


def _result(target: Observation, known: _KnownPart, factors: Unmixed, eps: float) -> Reconstruction:
    inputs, columns, rows = _inputs(target, known, factors, eps)
    proved, explains, labels, copies = _verdicts(target, known, inputs, columns, rows, eps)
    shown = inputs.nan_to_num().clamp(target.input_low, target.input_high).to(target.released)
    determined = None
    if not bool(known.in_columns.all()):
        determined = known.in_columns.expand(len(shown), -1).reshape(shown.shape)
    complete = len(inputs) * known.layer.positions == len(factors.rows)
    return Reconstruction(
        inputs=shown.repeat_interleave(copies, dim=0),
        labels=labels.repeat_interleave(copies),
        objective=1 - factors.score,
        status="ok" if complete and _covered(known.layer) and bool(explains.all()) else "degraded",
        certified=proved.repeat_interleave(copies),
        determined=None if determined is None else determined.repeat_interleave(copies, dim=0),
    )
