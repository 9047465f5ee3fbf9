"""A throw-away Slurm cluster on one Linux host, for the tests: slurmctld, slurmd per node, munge, slurmdbd and MariaDB.

    python tests/slurm/cluster.py [--nodes 2] [--cpus 4] [--no-accounting] [--conf 'Key=Value;...'] -- COMMAND ...

goes on in fresh pid, mount, network and UTS namespaces, starts the cluster there, runs COMMAND with SLURM_CONF set,
stops everything and exits with COMMAND's status. However it ends, SIGKILL included, the kernel ends and unmounts all
that was in there. Each node has a network namespace, an address and a host name of its own; `v-node2` is the cable of
node2.

Needs root and Debian's slurmctld, slurmd, slurm-client, munge and iproute2; slurmdbd and mariadb-server for accounting.
`--missing` prints what isn't there and ends. CLUSTER_LOGS=DIR keeps the daemons' logs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

NET = "10.77.0"
HEAD = f"{NET}.1"
INSIDE = "CLUSTER_INSIDE"
FOLDER = Path("/run/cluster")  # on a tmpfs of our own: where flushing is free MariaDB starts five times as fast
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacct")
PR_SET_PDEATHSIG = 1

# `low` is the partition whose jobs give way to `high`; they get SIGTERM at once and GraceTime seconds to leave.
PARTITIONS = """\
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=5 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

# Short waits; no cgroups. A requeued job may not start for cred_expire seconds: 120 by default, 5 is the least allowed.
# FirstJobId: fresh clusters that all begin at 1 would all derive the same ports from their job ids.
SLURM_CONF = """\
ClusterName=test
SlurmctldHost=head({head})
SlurmctldPort=6817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
{accounting}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
FirstJobId={first}
KillWait=5
SlurmdTimeout=20
MessageTimeout=5
TCPTimeout=2
MinJobAge=300
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
{conf}
{nodes}
{partitions}
"""

SLURMDBD_CONF = f"""\
AuthType=auth/munge
AuthInfo=socket={FOLDER}/run/munge.sock
DbdHost=head
DbdAddr={HEAD}
DbdPort=6819
SlurmUser=root
LogFile={FOLDER}/log/slurmdbd.log
PidFile={FOLDER}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
"""


def missing(accounting: bool = True) -> list[str]:
    """Programs that a cluster needs and this machine doesn't have; "root" when we aren't."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    wanted = PROGRAMS + (ACCOUNTING if accounting else ())
    return ([] if os.geteuid() == 0 else ["root"]) + [name for name in wanted if shutil.which(name, path=path) is None]


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)  # a Ctrl-C at the terminal is not for the daemons


def enter() -> None:
    """Goes on inside new namespaces. `unshare` itself ignores SIGTERM and SIGINT, so it is killed by us."""
    if os.environ.get(INSIDE) != str(os.getppid()):
        words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--uts"]
        words += ["--propagation", "private", sys.executable, *sys.argv]
        child = subprocess.Popen(words, env={**os.environ, INSIDE: "0"}, preexec_fn=die_with_parent)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: child.kill())
        code = child.wait()
        sys.exit(code if code >= 0 else 128 - code)
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    run("mount", "-t", "tmpfs", "tmpfs", "/run")  # state, sockets, network namespaces


def run(*words: str | Path) -> None:
    subprocess.run(words, check=True)


def said(*words: str) -> str:
    return subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


class Cluster:
    """The daemons, each a child in the foreground.

    Args:
        conf: more lines of slurm.conf.
    """

    def __init__(self, nodes: int = 2, cpus: int = 4, accounting: bool = True, conf: str = ""):
        self.names = [f"node{i + 1}" for i in range(nodes)]
        self.cpus, self.accounting, self.conf = cpus, accounting, conf
        self.procs: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        self.configure()
        self.network()
        self.start_munge()
        if self.accounting:
            self.start_database()
        self.spawn("slurmctld", "slurmctld", "-D", "-i")
        for name in self.names:
            (FOLDER / f"spool-{name}").mkdir()
            inside = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts"]
            self.spawn(f"slurmd-{name}", *inside, "sh", "-c", f"hostname {name}; exec slurmd -D -N {name}")
        idle = len(self.names)
        self.until(lambda: said("sinfo", "-h", "-N", "-p", "main", "-o", "%t").split().count("idle") >= idle, "idle")

    def stop(self) -> None:
        """Nothing in here is to be kept, so there is no orderly end, except that jobs write their last lines."""
        controller = self.procs.get("slurmctld")
        if controller is not None and controller.poll() is None:
            said("scancel", "-u", "root", "-s", "KILL", "--full")
            said("scancel", "-u", "root")
            end = time.monotonic() + 3
            while said("squeue", "-h").strip() and time.monotonic() < end:
                time.sleep(0.1)
        for process in reversed(self.procs.values()):
            process.kill()
            process.wait()
        if kept := os.environ.get("CLUSTER_LOGS"):
            shutil.copytree(FOLDER / "log", kept, dirs_exist_ok=True)

    # --- processes

    def spawn(self, name: str, *words: str, **env: str) -> None:
        with open(FOLDER / f"log/{name}.out", "ab") as log:
            self.procs[name] = subprocess.Popen(
                words, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def until(self, test: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
        end = time.monotonic() + limit_s
        while not test():
            for name, process in self.procs.items():
                if process.poll() is not None:
                    text = "".join(p.read_text()[-3000:] for p in FOLDER.glob(f"log/{name}.*"))
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{text}")
            if time.monotonic() > end:
                raise TimeoutError(what)
            time.sleep(0.02)

    # --- parts

    def address(self, name: str) -> str:
        return f"{NET}.{11 + self.names.index(name)}"

    def configure(self) -> None:
        for sub in ("log", "run", "state"):
            (FOLDER / sub).mkdir(parents=True)
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr={self.address(name)} CPUs={self.cpus} RealMemory=4000"
            for name in self.names
        )
        # AccountingStoragePass is how slurmctld is told of a private munge socket for slurmdbd
        accounting = (
            f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost={HEAD}\n"
            f"AccountingStoragePort=6819\nAccountingStoragePass={FOLDER}/run/munge.sock"
            if self.accounting
            else "AccountingStorageType=accounting_storage/none"
        )
        first = random.randrange(1000, 60000)
        text = SLURM_CONF.format(
            head=HEAD, folder=FOLDER, accounting=accounting, first=first, conf=self.conf, nodes=nodes,
            partitions=PARTITIONS,
        )  # fmt: skip
        (FOLDER / "slurm.conf").write_text(text)
        (FOLDER / "plugstack.conf").write_text("")
        # slurmd loads a cgroup plugin at its start although nothing here uses it
        (FOLDER / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (FOLDER / "slurmdbd.conf").write_text(SLURMDBD_CONF)
        (FOLDER / "slurmdbd.conf").chmod(0o600)
        os.environ["SLURM_CONF"] = str(FOLDER / "slurm.conf")  # the other files are looked for beside it

    def network(self) -> None:
        """A bridge, and a cable from it into each node's namespace."""
        socket.sethostname("head")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", "lan0", "type", "bridge")
        run("ip", "addr", "add", f"{HEAD}/24", "dev", "lan0")
        run("ip", "link", "set", "lan0", "up")
        hosts = [f"127.0.0.1 localhost\n{HEAD} head", *(f"{self.address(name)} {name}" for name in self.names)]
        (FOLDER / "hosts").write_text("\n".join([*hosts, ""]))
        run("mount", "--bind", FOLDER / "hosts", "/etc/hosts")  # in our mount namespace only
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", f"v-{name}", "master", "lan0", "up")
            run("ip", "-n", name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")

    def start_munge(self) -> None:
        key, sock = FOLDER / "run/munge.key", FOLDER / "run/munge.sock"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        places = [f"--{what}-file={FOLDER}/{where}" for what, where in (
            ("log", "log/munged.log"), ("pid", "run/munged.pid"), ("seed", "run/munged.seed"))]  # fmt: skip
        self.spawn("munged", "munged", "-F", f"--socket={sock}", f"--key-file={key}", *places)
        self.until(sock.exists, "munge")

    def start_database(self) -> None:
        sock, data = FOLDER / "run/my.sock", f"--datadir={FOLDER}/db"
        words = ["--no-defaults", data, "--user=root", "--skip-test-db", "--skip-name-resolve"]
        words += ["--auth-root-authentication-method=socket"]
        env = {**os.environ, "TMPDIR": str(FOLDER)}  # two clusters may start at once
        done = subprocess.run(["mariadb-install-db", *words], env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"mariadb-install-db: {done.stdout}{done.stderr}")
        self.spawn(
            "mariadbd", "mariadbd", "--no-defaults", "--user=root", data, f"--socket={sock}",
            f"--pid-file={FOLDER}/run/my.pid", "--skip-networking", "--skip-log-bin", "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900",
        )  # fmt: skip

        def answers() -> bool:
            with socket.socket(socket.AF_UNIX) as line:
                return line.connect_ex(str(sock)) == 0 and bool(line.recv(1))

        def listens() -> bool:
            with socket.socket() as line:
                return line.connect_ex((HEAD, 6819)) == 0

        self.until(answers, "MariaDB")
        self.spawn("slurmdbd", "slurmdbd", "-D", MYSQL_UNIX_PORT=str(sock))
        self.until(listens, "slurmdbd")


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=4, help="of each node; the host may have fewer")
    parser.add_argument("--no-accounting", action="store_true", help="neither slurmdbd nor MariaDB: sacct says nothing")
    parser.add_argument("--conf", default="", help="more lines of slurm.conf, separated by ;")
    parser.add_argument("--missing", action="store_true", help="print what isn't there, and end")
    parser.add_argument("command", nargs="*")
    asked = parser.parse_args()
    lacks = missing(not asked.no_accounting)
    if asked.missing:
        print(" ".join(lacks))
        sys.exit(0)
    if lacks or not asked.command:
        parser.error(f"this machine lacks {', '.join(lacks)}" if lacks else "no command")
    enter()
    began = time.monotonic()
    with Cluster(asked.nodes, asked.cpus, not asked.no_accounting, asked.conf.replace(";", "\n")) as cluster:
        print(f"cluster: {len(cluster.names)} nodes up after {time.monotonic() - began:.1f} s", file=sys.stderr)
        code = subprocess.run(asked.command).returncode
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
