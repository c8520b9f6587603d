"""Limits on a file of weights, and the error for files beyond them, or of another kind.

The limits are far above every image classifier, and low enough that any file within them is checked in two seconds and
some hundred megabytes of memory.
"""

MAX_BYTES = 8 << 30
"""Largest size of a file."""
MAX_HEADER_BYTES = 4 << 20
"""Largest header of safetensors: 20,000 tensors with long names."""
MAX_TENSORS = 20_000
MAX_NAME = 512
"""Longest name of a tensor, in characters."""
MAX_DIMENSIONS = 16

WAY_OUT = 'save its weights alone where it was trained: safetensors.torch.save_model(model, "model.safetensors")'
"""Advice for files of a kind that is always refused. It names `save_model`, because `save_file` refuses tensors that
share memory."""


class FileRefused(ValueError):
    """Raised for a file of weights that is broken, of a kind that can run code, or beyond a limit."""


def shown(value: object) -> str:
    """Returns a file's value as an error quotes it: short, and without control characters for a terminal.

    Lists are shown if they are short and hold integers alone: a list that contains itself many times has no end.
    """
    if isinstance(value, list | tuple):
        if len(value) > 16 or not all(type(item) is int for item in value):
            return f"a {type(value).__name__} of {len(value)}"
    elif not isinstance(value, str | bytes | int | float | None):
        return f"a {type(value).__name__}"
    text = ascii(value[:512] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"
