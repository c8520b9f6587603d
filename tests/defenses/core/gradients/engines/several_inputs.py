"""Networks with several input tensors, and batches of them as dictionaries and tuples."""

import torch
from torch import Tensor, nn

from leakbench.defenses.core import InputTensors

from .modules import CLASSES, WORDS

LENGTH = 6


class MaskedText(nn.Module):
    """A classifier of words: the mean over the words that a mask counts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.inner, self.out = nn.Embedding(WORDS, 5), nn.Linear(5, 8), nn.Linear(8, CLASSES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids, attention_mask):
        hidden = self.dropout(torch.tanh(self.inner(self.words(input_ids)))) * attention_mask.unsqueeze(2)
        return self.out(hidden.sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1))


class PictureWithTable(nn.Module):
    """A convolution of pictures, and a linear layer of a table beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.table, self.out = nn.Conv2d(2, 3, 3), nn.Linear(4, 5), nn.Linear(3 * 16 + 5, CLASSES)

    def forward(self, picture, table):
        hidden = torch.cat([self.picture(picture).flatten(1), self.table(table)], dim=1)
        return self.out(torch.tanh(hidden))


def texts(count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, LENGTH + 1, (count, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": torch.randint(0, WORDS, (count, LENGTH), generator=generator) * mask, "attention_mask": mask}


def pictures(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 2, 6, 6, generator=generator, dtype=dtype),
        torch.randn(count, 4, generator=generator, dtype=dtype),
    )


def loop(model: nn.Module, inputs: InputTensors, targets: Tensor, loss) -> Tensor:
    """Rows by plain autograd on batches of one, with a call of the model that is written out."""
    trained, rows = [p for p in model.parameters() if p.requires_grad], []
    for i in range(len(targets)):
        alone = [values[i : i + 1] for values in inputs.tensors]
        outputs = model(*alone) if inputs.names is None else model(**dict(zip(inputs.names, alone, strict=True)))
        gradients = torch.autograd.grad(loss(outputs, targets[i : i + 1]).sum(), trained, materialize_grads=True)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.stack(rows)
