"""The version of this package, for the layers below it too."""

__version__ = "0.1.0"
