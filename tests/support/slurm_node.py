"""A Slurm of one node, for tests: munged, slurmctld and slurmd with their own folder, ports and key.

    python tests/support/slurm_node.py start FOLDER     # prints the line that shells need: export SLURM_CONF=...
    python tests/support/slurm_node.py stop FOLDER

It needs the packages slurmctld, slurmd, slurm-client and munge, and works as root or as any other user. Nothing of a
Slurm that is installed already is touched. There is no accounting, as on many small clusters. The node claims four
cores, whatever the machine has, so that several jobs run at once. FOLDER must not lie on a memory file system that
forbids sockets, and its path must be short: a socket's path has at most 107 characters.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "squeue", "sbatch", "scancel", "scontrol", "sinfo", "srun")
CORES = 4
LONGEST_WAIT_S = 60

_CONFIGURATION = """\
ClusterName=pagetwin
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=1,bf_interval=2
PriorityType=priority/basic
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldTimeout=60
SlurmdTimeout=60
InactiveLimit=0
KillWait=2
MinJobAge=10
UnkillableStepTimeout=10
JobRequeue=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} SocketsPerBoard=1 CoresPerSocket={cores} ThreadsPerCore=1
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
PartitionName=spare Nodes={host} Default=NO MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """The programs that are not installed."""
    place = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=place) is None]


def start(folder: Path) -> Path:
    """Start the node in a fresh folder and wait until it takes jobs; returns its slurm.conf."""
    folder = folder.resolve()
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True, mode=0o700)
    folder.chmod(0o755)  # munged refuses a folder of its socket that others may write to
    configuration = folder / "slurm.conf"
    configuration.write_text(
        _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=folder,
            control=_free_port(),
            node=_free_port(),
            cores=CORES,
        )
    )
    _start_munge(folder)
    environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    for program in ("slurmctld", "slurmd"):
        subprocess.run([program, "-f", str(configuration)], env=environment, check=True, cwd=folder)
    _wait_until_idle(environment, folder)
    return configuration


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start_munge(folder: Path) -> None:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    options = [
        f"--socket={folder}/munge.socket",
        f"--key-file={key}",
        f"--pid-file={folder}/munged.pid",
        f"--seed-file={folder}/munge.seed",
        f"--log-file={folder}/munged.log",
    ]
    place = f"{os.environ['PATH']}:/usr/sbin"
    subprocess.run(["munged", *options], check=True, env={**os.environ, "PATH": place})


def _wait_until_idle(environment: dict[str, str], folder: Path) -> None:
    end = time.monotonic() + LONGEST_WAIT_S
    while time.monotonic() < end:
        said = subprocess.run(
            ["sinfo", "--noheader", "--format=%T"], env=environment, capture_output=True, text=True
        )
        if said.stdout.split()[:1] == ["idle"]:
            return
        time.sleep(0.2)
    logs = "\n".join((folder / f"{name}.log").read_text()[-2000:] for name in ("slurmctld", "slurmd"))
    raise RuntimeError(f"the node did not come up: {said.stdout}{said.stderr}\n{logs}")


def stop(folder: Path) -> None:
    """End the three programs by their ids, and wait until they are gone."""
    for name in ("slurmd", "slurmctld", "munged"):
        file = folder / f"{name}.pid"
        if file.exists():
            _end(int(file.read_text()))


def _end(pid: int) -> None:
    end = time.monotonic() + LONGEST_WAIT_S
    try:
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < end:
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("start", "stop"):
        sys.exit(__doc__)
    if sys.argv[1] == "stop":
        stop(Path(sys.argv[2]))
    elif missing():
        sys.exit(f"not installed: {', '.join(missing())}; on Debian: slurmctld slurmd slurm-client munge")
    else:
        print(f"export SLURM_CONF={start(Path(sys.argv[2]))}")  # noqa: T201
