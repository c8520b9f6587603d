"""What a file of weights may at most be, and the error of one that is more, or other.

The limits are far above every image classifier, and low enough that whatever keeps to them is looked through within
two seconds and some hundred megabytes of memory.
"""

MAX_BYTES = 8 << 30
"""Of a file."""
MAX_HEADER_BYTES = 4 << 20
"""Of the header of safetensors: 20,000 tensors with long names."""
MAX_TENSORS = 20_000
MAX_NAME = 512
"""Characters of a tensor's name."""
MAX_DIMENSIONS = 16

WAY_OUT = 'save its weights alone where it was trained: safetensors.torch.save_model(model, "model.safetensors")'
"""For what is refused whatever it holds. `save_model`, because `save_file` refuses tensors that share their memory."""


class FileRefused(ValueError):
    """A file of weights was not read, since it is broken, of a kind that can run code, or beyond a limit."""


def shown(value: object) -> str:
    """What a file says, as an error quotes it: short, and without characters that a terminal would obey.

    Lists are shown where they are short and hold numbers alone: one that holds itself many times over has no end.
    """
    if isinstance(value, list | tuple):
        if len(value) > 16 or not all(type(item) is int for item in value):
            return f"a {type(value).__name__} of {len(value)}"
    elif not isinstance(value, str | bytes | int | float | None):
        return f"a {type(value).__name__}"
    text = ascii(value[:512] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"
