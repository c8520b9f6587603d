"""Errors of suites, in a module that imports nothing: the command tells them from others before PyTorch is imported."""


class SuiteError(ValueError):
    """The mistakes of a suite, one per line: `file: key.path: problem`."""


class ChoiceError(SuiteError):
    """The command line named a missing suite, method or key: a usage error, not a bad file."""
