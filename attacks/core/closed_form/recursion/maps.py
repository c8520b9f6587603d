"""Linear maps between tensors, with their normal matrices, such as from a layer's input to its output or gradient.

Every map takes and returns batches, [b, *shape], and has an adjoint, so that least squares need no explicit matrix.
`gram` is the normal matrix M^T D M over the flat unknowns; subclasses build it from their structure, not from M.
"""

import math

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Largest number of entries of a batch of unit vectors, if a normal matrix is built column by column: 128 MiB."""


class LinearMap:
    """Linear map from tensors of `shape_in` to tensors of `shape_out`, in float64.

    Attributes:
        like: any tensor on its device; float64.
        lossy: whether the range is known to have fewer dimensions than the domain, as for pooling.
    """

    lossy = False

    def __init__(self, shape_in: tuple[int, ...], shape_out: tuple[int, ...], like: Tensor) -> None:
        self.shape_in, self.shape_out, self.like = tuple(shape_in), tuple(shape_out), like

    @property
    def unknowns(self) -> int:
        """Dimension of the domain."""
        return math.prod(self.shape_in)

    def apply(self, x: Tensor) -> Tensor:
        """Applies the map: [b, *shape_in] -> [b, *shape_out]."""
        raise NotImplementedError(f"{type(self).__name__} must say what it maps to")

    def adjoint(self, y: Tensor) -> Tensor:
        """Applies the adjoint: [b, *shape_out] -> [b, *shape_in]."""
        raise NotImplementedError(f"{type(self).__name__} must say what its adjoint is")

    def columns(self) -> Tensor:
        """Returns the matrix, [unknowns, rows]: images of the unit vectors, as rows."""
        n = self.unknowns
        step = max(1, CHUNK // max(n, math.prod(self.shape_out)))
        images = self.like.new_empty(n, math.prod(self.shape_out))
        for start in range(0, n, step):
            stop = min(n, start + step)
            units = self.like.new_zeros(stop - start, n)
            units[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
            images[start:stop] = self.apply(units.view(-1, *self.shape_in)).flatten(1)
        return images

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns M^T D M, [unknowns, unknowns].

        Args:
            weights: the diagonal D, in `shape_out`; None for 1.
        """
        columns = self.columns()
        return (columns if weights is None else columns * weights.flatten()) @ columns.T


class IdentityMap(LinearMap):
    """Identity map."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__(shape, shape, like)

    def apply(self, x: Tensor) -> Tensor:
        """Returns the tensor itself."""
        return x

    def adjoint(self, y: Tensor) -> Tensor:
        """Returns the tensor itself."""
        return y

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns the diagonal matrix of the weights."""
        return torch.diag(self.like.new_ones(self.unknowns) if weights is None else weights.flatten())


class Factors(LinearMap):
    """Elementwise product with factors per channel or entry, such as of a batch norm in evaluation mode."""

    def __init__(self, factors: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(shape, shape, factors)
        self.factors = factors.expand(shape)

    def apply(self, x: Tensor) -> Tensor:
        """Multiplies entry by entry."""
        return x * self.factors

    def adjoint(self, y: Tensor) -> Tensor:
        """Multiplies entry by entry."""
        return y * self.factors

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns a diagonal matrix."""
        squares = self.factors.square()
        return torch.diag((squares if weights is None else squares * weights).flatten())


class Reshaped(LinearMap):
    """Composition of a reshape and another map, such as after flattening."""

    def __init__(self, inner: LinearMap, shape_in: tuple[int, ...]) -> None:
        super().__init__(shape_in, inner.shape_out, inner.like)
        self.inner, self.lossy = inner, inner.lossy

    def apply(self, x: Tensor) -> Tensor:
        """Applies the inner map to the reshaped tensor."""
        return self.inner.apply(x.reshape(-1, *self.inner.shape_in))

    def adjoint(self, y: Tensor) -> Tensor:
        """Applies the inner adjoint, and restores this shape."""
        return self.inner.adjoint(y).reshape(-1, *self.shape_in)

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns the inner matrix: the order of the unknowns is the same."""
        return self.inner.gram(weights)


class Then(LinearMap):
    """Composition of two maps."""

    def __init__(self, first: LinearMap, second: LinearMap) -> None:
        super().__init__(first.shape_in, second.shape_out, first.like)
        self.first, self.second, self.lossy = first, second, first.lossy or second.lossy

    def apply(self, x: Tensor) -> Tensor:
        """Applies the first map, then the second."""
        return self.second.apply(self.first.apply(x))

    def adjoint(self, y: Tensor) -> Tensor:
        """Applies the adjoints in reverse order."""
        return self.first.adjoint(self.second.adjoint(y))


class Dense(LinearMap):
    """Matrix on the flat tensor."""

    def __init__(self, matrix: Tensor, shape_in: tuple[int, ...]) -> None:
        super().__init__(shape_in, (len(matrix),), matrix)
        self.matrix = matrix

    def apply(self, x: Tensor) -> Tensor:
        """Multiplies by the matrix."""
        return x.flatten(1) @ self.matrix.T

    def adjoint(self, y: Tensor) -> Tensor:
        """Multiplies by the transpose."""
        return (y @ self.matrix).view(-1, *self.shape_in)

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns the matrix product."""
        return self.matrix.T @ (self.matrix if weights is None else weights[:, None] * self.matrix)


class OuterProduct(LinearMap):
    """Gradient of a linear layer's weight as a map of its input: k x^T, at released entries.

    K^T K is diagonal, because each equation contains a single entry of the input.
    """

    def __init__(self, slopes: Tensor, size: int, observed: Tensor | None) -> None:
        """Builds the map from the derivatives with respect to the layer's output.

        Args:
            slopes: k, [outputs].
            size: size of the input.
            observed: bool [outputs, size]; None for all.
        """
        super().__init__((size,), (len(slopes), size), slopes)
        self.slopes, self.observed = slopes, observed

    def apply(self, x: Tensor) -> Tensor:
        """Returns k x^T."""
        product = self.slopes[:, None] * x[:, None, :]
        return product if self.observed is None else product * self.observed

    def adjoint(self, y: Tensor) -> Tensor:
        """Returns k^T y."""
        return torch.einsum("f,bfn->bn", self.slopes, y if self.observed is None else y * self.observed)

    def squares(self, weights: Tensor | None = None) -> Tensor:
        """Returns the diagonal of K^T D K, [size]."""
        each = self.slopes.square()[:, None].expand(self.shape_out)
        each = each if self.observed is None else each * self.observed
        return (each if weights is None else each * weights).sum(dim=0)

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns a diagonal matrix."""
        return torch.diag(self.squares(weights))


class Coefficients(LinearMap):
    """Inner products of a map's result with the columns of a basis."""

    def __init__(self, inner: LinearMap, basis: Tensor) -> None:
        """Builds the map from a basis of the flat range.

        Args:
            inner: the map.
            basis: [rows of the inner map, k].
        """
        super().__init__(inner.shape_in, (basis.shape[1],), basis)
        self.inner, self.basis = inner, basis
        self.lossy = inner.lossy

    def apply(self, x: Tensor) -> Tensor:
        """Returns V^T of the inner map's result."""
        return self.inner.apply(x).flatten(1) @ self.basis

    def adjoint(self, y: Tensor) -> Tensor:
        """Returns the inner adjoint of V y."""
        return self.inner.adjoint((y @ self.basis.T).view(-1, *self.inner.shape_out))

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns the normal matrix, computed from as many rows as the basis has columns."""
        rows = self.inner.adjoint(self.basis.T.reshape(-1, *self.inner.shape_out)).flatten(1)
        return rows.T @ (rows if weights is None else weights[:, None] * rows)
