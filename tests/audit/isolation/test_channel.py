"""Messages between processes: tensors bit for bit, and nothing but messages."""

import socket
import struct

import pytest
import torch
from torch import nn

from leakbench.audit.isolation.channel import MOST_BYTES, Channel, GarbledError, flat, tensor

from ...parameters import subtests

VALUES = [
    torch.tensor([torch.nan, torch.inf, -0.0, 1e-45]),
    torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last),
    torch.arange(6).view(2, 3).T,
    torch.arange(12)[::3],
    torch.ones(2, 1, dtype=torch.float64).expand(2, 5),
    torch.zeros(0, 3, dtype=torch.bool),
    torch.tensor(7, dtype=torch.uint8),
    nn.Parameter(torch.ones(2, dtype=torch.float16)),
]


@pytest.fixture
def ends():
    """A channel, and the bare other end of it."""
    here, there = socket.socketpair()
    with here, there:
        yield Channel(here), there


@subtests("values", VALUES)
def test_a_tensor_arrives_bit_for_bit_and_in_its_order(ends, values):
    here, there = ends
    told, content = flat(values)
    Channel(there).send({"told": told}, [content])
    header, (blob,) = here.receive(5)
    found = tensor(header["told"], blob)
    assert found.dtype == values.dtype and found.shape == values.shape
    assert bytes(flat(found)[1]) == bytes(content)
    if 0 not in values.stride() and values.numel() == values.untyped_storage().nbytes() // values.element_size():
        assert found.stride() == values.stride()


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (struct.pack("!IQ", 5, MOST_BYTES + 1), "must have at most"),
        (struct.pack("!IQ", 3, 0) + b"{,}", "must be JSON"),
        (struct.pack("!IQ", 100_000, 0) + b"[" * 100_000, "must be JSON"),
        (struct.pack("!IQ", 2, 0) + b"{}", "must say how many bytes follow it"),
        (struct.pack("!IQ", 14, 9) + b'{"blobs": [8]}', "as many bytes must follow as the header says, 8, got 9"),
    ],
    ids=range(5),
)
def test_what_is_no_message_is_refused(ends, sent, sentence):
    here, there = ends
    there.sendall(sent)
    with pytest.raises(GarbledError, match=sentence):
        here.receive(5)


@subtests(
    "changed",
    [{"dtype": "object"}, {"shape": [3]}, {"shape": [-1, -2]}, {"order": [0, 0]}, {"order": 3}, {"device": "nowhere"}],
)
def test_a_tensor_that_is_not_described_as_it_is_is_refused(changed):
    told, content = flat(torch.zeros(1, 2))
    with pytest.raises(GarbledError, match="a tensor must be described as it is"):
        tensor(told | changed, bytearray(content))


def test_half_a_message_is_waited_for_no_longer_than_the_limit(ends):
    here, there = ends
    there.sendall(struct.pack("!IQ", 3, 0))
    with pytest.raises(TimeoutError):
        here.receive(0.2)
    there.close()
    with pytest.raises(EOFError):
        here.receive(5)
