"""Flower, imported in one place: its telemetry off unless somebody turns it on, its own chatter in our log's level."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import Any

from echofree.errors import MissingExtra


def load(name: str = "flwr") -> Any:
    """A module of Flower.

    Raises:
        MissingExtra: it isn't installed.
    """
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # it would otherwise tell its makers about every start
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of packages that Flower uses, not of ours
            found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("flwr", "grpc"):
            raise
        raise MissingExtra(error.name, "federated", "python -m echofree.federate") from error
    logger = logging.getLogger("flwr")
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    logging.getLogger("grpc._server").addFilter(_no_trace_of_a_client_that_left)
    return found


def _no_trace_of_a_client_that_left(record: logging.LogRecord) -> bool:
    """The round says who is missing; the stack of the connection's thread adds nothing."""
    return record.exc_info is None or type(record.exc_info[1]).__name__ != "GrpcBridgeClosed"
