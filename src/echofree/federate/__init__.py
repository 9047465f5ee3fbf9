"""python -m echofree.federate: fine-tuning on clients that keep their audio, on Flower.

The config is that of train. Each client trains with the EchoFree loop on its share (`data.partition`); the server
averages what they send, round by round, into checkpoints of an ordinary run directory. federated.role says what this
process is: all of it (a simulation), a server, a client, or the maker of certificates to try TLS with.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echofree.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from echofree.config.compose import Composed


def main(argv: Sequence[str] | None = None) -> int:
    """The verb. -> the exit code"""
    from echofree.config.compose import main_config
    from echofree.config.help import verb_help
    from echofree.verb import ending, help_asked

    words = list(sys.argv[1:] if argv is None else argv)
    if help_asked(words):
        print(verb_help("federate"))
        return 0
    if {"-m", "--multirun"} & set(words):
        print("federate runs one training at a time: leave -m out", file=sys.stderr)
        return int(ExitCode.USER)
    composed = main_config(words)
    return ending(lambda: run(composed))


def run(composed: Composed) -> int:
    """What federated.role asks for. -> the exit code"""
    from echofree.config.schema import FederatedRole
    from echofree.federate import certificate, flower, rules

    config: Any = composed.config
    settings = config.federated
    if settings.role is FederatedRole.certificates:
        if settings.certificates is None:
            raise ConfigError("federated.role=certificates: name a folder. Type: federated.certificates=certificates")
        host = settings.address.rpartition(":")[0]
        for path in certificate.make(Path(settings.certificates), host):
            print(path)
        return int(ExitCode.DONE)
    flower.load()
    composed.notes += rules.settle(config)
    if settings.role is FederatedRole.client:
        from echofree.federate import remote

        return remote.run(config)
    from echofree import train
    from echofree.federate import server

    return server.run(config, train.prepare(composed, 1))
