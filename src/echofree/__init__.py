"""EchoFree: train acoustic echo cancellers anywhere, prove the run, ship them to the device."""

__version__ = "0.1.0"
__all__ = ["__version__"]
