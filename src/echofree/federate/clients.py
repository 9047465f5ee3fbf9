"""The client's end of Flower's messages: of a simulation, and over its transport. Imports Flower: see `flower.load`."""

from __future__ import annotations

from typing import Any

from flwr.client import Client
from flwr.common import (
    Code,
    DisconnectRes,
    EvaluateRes,
    FitRes,
    GetParametersRes,
    GetPropertiesRes,
    Parameters,
    Status,
)
from flwr.server.client_proxy import ClientProxy

from echofree.errors import EchoFreeError
from echofree.federate.worker import Pool

OK = Status(code=Code.OK, message="")


def fit(pool: Pool, client: int, ins: Any, timeout_s: float | None) -> FitRes:
    """A worker trains as client number `client`."""
    config = ins.config
    reply = pool.ask(
        {
            "what": "fit", "client": client, "number": int(config["round"]), "tensors": list(ins.parameters.tensors),
            "mu": float(config["proximal_mu"]), "mark": str(config["mark"]),
            "run": str(config["run"]),
        },
        timeout_s,
    )  # fmt: skip
    parameters = Parameters(reply["tensors"], "numpy.ndarray")
    return FitRes(OK, parameters, max(0, round(1000 * reply["seconds"])), dict(reply["facts"]))


def evaluate(pool: Pool, client: int, ins: Any, timeout_s: float | None) -> EvaluateRes:
    """A worker scores as client number `client`."""
    message = {"what": "evaluate", "client": client, "number": int(ins.config["round"])}
    message["run"] = str(ins.config["run"])
    reply = pool.ask({**message, "tensors": list(ins.parameters.tensors)}, timeout_s)
    scores = reply["scores"]
    return EvaluateRes(OK, float(scores.get("loss", 0.0)), int(reply["clips"]), dict(scores))


class Simulated(ClientProxy):  # type: ignore[misc,unused-ignore]
    """A client on this machine, as the server sees it: no transport between them, the same messages."""

    def __init__(self, number: int, name: str, pool: Pool):
        super().__init__(f"{number:05d}")
        self.number, self.name, self.pool = number, name, pool

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        return GetPropertiesRes(OK, {"client": self.number, "name": self.name})

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> GetParametersRes:
        raise NotImplementedError("the server has the first weights itself")

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> FitRes:
        return fit(self.pool, self.number, ins, timeout)

    def evaluate(self, ins: Any, timeout: float | None, group_id: int | None) -> EvaluateRes:
        return evaluate(self.pool, self.number, ins, timeout)

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> DisconnectRes:
        return DisconnectRes(reason="")


class Remote(Client):  # type: ignore[misc,unused-ignore]
    """A client of its own process, which relays what Flower's transport brings to the worker beside it. What the worker
    raises goes to the server as the client's answer."""

    def __init__(self, number: int, name: str, pool: Pool):
        self.number, self.name, self.pool = number, name, pool

    def get_properties(self, ins: Any) -> GetPropertiesRes:
        return GetPropertiesRes(OK, {"client": self.number, "name": self.name})

    def fit(self, ins: Any) -> FitRes:
        try:
            return fit(self.pool, self.number, ins, None)
        except EchoFreeError as error:
            status = Status(Code.FIT_NOT_IMPLEMENTED, str(error))  # Flower's own code for a failure with a text
            return FitRes(status, Parameters([], "numpy.ndarray"), 0, {})

    def evaluate(self, ins: Any) -> EvaluateRes:
        try:
            return evaluate(self.pool, self.number, ins, None)
        except EchoFreeError as error:
            return EvaluateRes(Status(Code.EVALUATE_NOT_IMPLEMENTED, str(error)), 0.0, 0, {})
