"""`execute=slurm` on a real Slurm of one node: whatever is killed, nothing is lost and nothing runs twice."""

import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import slurm_node
from cluster_drive import Sweep, wait

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(
        bool(slurm_node.missing()), reason=f"no Slurm: {', '.join(slurm_node.missing())} missing"
    ),
    pytest.mark.skipif(find_spec("submitit") is None, reason="submitit is not installed: pagetwin[cluster]"),
]
POINTS = 12
ONCE = Counter(f"any {seed}" for seed in range(POINTS))


@pytest.fixture(scope="module")
def node() -> Iterator[Path]:
    """A Slurm of one node with four cores; jobs find it by SLURM_CONF."""
    folder = Path(tempfile.mkdtemp(prefix="pt-slurm-", dir="/tmp"))  # a short path, for sockets
    configuration = slurm_node.start(folder)
    before = os.environ.get("SLURM_CONF")
    os.environ["SLURM_CONF"] = str(configuration)
    yield folder
    asked("scancel", f"--user={os.getuid()}")
    slurm_node.stop(folder)
    os.environ.pop("SLURM_CONF")
    if before is not None:
        os.environ["SLURM_CONF"] = before


@pytest.fixture
def sweep(node: Path, tmp_path: Path) -> Iterator[Sweep]:
    """Twelve points in up to three jobs."""
    yield sweep_of(tmp_path)
    (tmp_path / "limit").unlink(missing_ok=True)
    asked("scancel", f"--user={os.getuid()}")


def sweep_of(folder: Path, *words: str) -> Sweep:
    own = [f"execute.folder={folder}/jobs", "execute=slurm", "execute.jobs=3", "execute.poll_s=0.5"]
    return Sweep(folder, "trace.name=any", f"workload.seed=range({POINTS})", *own, *words)


def asked(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def tasks(state: str) -> list[str]:
    return asked("squeue", "--noheader", "--array", f"--states={state}", "--format=%i").split()


def control(*words: str) -> None:
    subprocess.run(["scontrol", *words], check=True)


def job_processes() -> list[int]:
    """Ids of the Python processes of jobs, which submitit starts."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"submitit.core._submit" in words and b"srun" not in words[0]:
                found.append(int(folder.name))
    return found


def test_a_sweep_finishes_in_few_jobs_and_runs_each_point_once(sweep: Sweep) -> None:
    assert sweep.finish() == 0, sweep.said
    assert sweep.runs() == ONCE
    assert len(sweep.records()) == POINTS
    assert [len(each["groups"]) for each in sweep.jobs()] == [3]


def test_a_job_that_is_cancelled_is_submitted_again(sweep: Sweep) -> None:
    sweep.let_run(4)
    driver = sweep.start()
    sweep.wait_for_runs(5, driver)
    asked("scancel", tasks("RUNNING")[0])
    sweep.wait_until("submitting again", driver)
    sweep.let_all_run()
    assert driver.wait() == 0, sweep.said
    assert len(sweep.records()) == POINTS
    assert "ended (CANCELLED)" in sweep.said
    assert sweep.runs().total() <= POINTS + 1  # the one that ran in the cancelled job


def test_a_worker_that_is_killed_loses_no_point(sweep: Sweep) -> None:
    sweep.let_run(4)
    driver = sweep.start()
    sweep.wait_for_runs(5, driver)
    os.kill(job_processes()[0], signal.SIGKILL)
    sweep.wait_until("submitting again", driver)
    sweep.let_all_run()
    assert driver.wait() == 0, sweep.said
    assert len(sweep.records()) == POINTS
    assert sweep.runs().total() <= POINTS + 1


def test_a_killed_driver_comes_back_and_runs_nothing_twice(sweep: Sweep) -> None:
    sweep.let_run(4)
    driver = sweep.start()
    sweep.wait_for_runs(5, driver)
    driver.kill()
    driver.wait()
    sweep.let_run(8)
    sweep.wait_for_records(7)
    again = sweep.start()
    sweep.wait_until("of an earlier run still in Slurm", again)
    sweep.let_all_run()
    assert again.wait() == 0, sweep.said
    assert sweep.runs() == ONCE
    assert len(sweep.jobs()) == 1


def test_a_driver_killed_before_it_noted_the_job_finds_it_by_its_name(sweep: Sweep) -> None:
    sweep.let_run(4)
    driver = sweep.start()
    sweep.wait_for_runs(5, driver)
    driver.kill()
    driver.wait()
    book = sweep.folder / "results" / "default" / "jobs.json"
    number = sweep.jobs()[0]["number"]
    book.write_text(book.read_text().replace(f'"number": "{number}"', '"number": null'))
    again = sweep.start()
    sweep.wait_until("of an earlier run still in Slurm", again)
    sweep.let_all_run()
    assert again.wait() == 0, sweep.said
    assert sweep.runs() == ONCE


def test_an_interrupt_leaves_the_jobs_and_says_how_to_stop_them(sweep: Sweep) -> None:
    sweep.let_run(0)
    driver = sweep.start()
    sweep.wait_for_runs(3, driver)
    driver.send_signal(signal.SIGINT)
    assert driver.wait() == 130
    assert "stay in Slurm and go on" in sweep.said
    assert f"scancel --name={sweep.jobs()[0]['name']}" in sweep.said
    assert len(tasks("RUNNING")) == 3


def test_jobs_wait_for_a_drained_node_and_a_resume_finishes_them(sweep: Sweep) -> None:
    name = asked("sinfo", "--noheader", "--format=%n").split()[0]
    control("update", f"nodename={name}", "state=drain", "reason=test")
    try:
        driver = sweep.start()
        sweep.wait_until("3 jobs of 3 waiting in Slurm", driver)
        assert (
            "DRAINED" in sweep.said or "UnavailableNodes" in sweep.said
        )  # by the part of Slurm that looked last
        driver.send_signal(signal.SIGINT)
        assert driver.wait() == 130
        assert sweep.records() == []
    finally:
        control("update", f"nodename={name}", "state=resume")
    assert sweep.finish() == 0, sweep.said
    assert sweep.runs() == ONCE
    assert len(sweep.jobs()) == 1


def test_a_node_that_does_not_see_the_store_stops_the_sweep(sweep: Sweep, tmp_path: Path) -> None:
    control(
        "update",
        f"nodename={asked('sinfo', '--noheader', '--format=%n').split()[0]}",
        "state=drain",
        "reason=x",
    )
    try:
        driver = sweep.start()
        sweep.wait_until("3 jobs of 3 waiting in Slurm", driver)
        (tmp_path / "results/default/sweep.json").rename(tmp_path / "elsewhere.json")
    finally:
        control(
            "update", f"nodename={asked('sinfo', '--noheader', '--format=%n').split()[0]}", "state=resume"
        )
    assert driver.wait() != 0
    assert "does not see the store in" in sweep.said
    assert sweep.records() == []


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A bucket on a server of S3 on this machine."""
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed (pip install 'pagetwin[s3]')")
    moto = pytest.importorskip("moto.server", reason="moto is not installed (pip install 'moto[server]')")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "results"),
    }.items():
        monkeypatch.setenv(name, value)
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    files.mkdir("bucket")
    yield "bucket"
    files.rm("bucket", recursive=True)
    server.stop()


def kept(bucket: str) -> list[str]:
    """The records in a bucket."""
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True)
    return [key for key in files.find(bucket) if key.endswith("/record.json")]


def test_points_of_jobs_go_to_a_store_on_object_storage(sweep: Sweep, bucket: str) -> None:
    assert sweep.finish(f"out=s3://{bucket}/one") == 0, sweep.said
    assert len(kept(bucket)) == POINTS
    assert sweep.runs() == ONCE


def test_what_jobs_did_without_a_command_is_sent_by_the_next_one(sweep: Sweep, bucket: str) -> None:
    sweep.let_run(4)
    driver = sweep.start(f"out=s3://{bucket}/one")
    sweep.wait_for_runs(5, driver)
    driver.kill()
    driver.wait()
    sweep.let_all_run()
    sweep.wait_for_records(POINTS)
    assert sweep.finish(f"out=s3://{bucket}/one") == 0, sweep.said
    assert len(kept(bucket)) == POINTS
    assert sweep.runs() == ONCE


def test_a_requeued_job_goes_on_where_it_was(sweep: Sweep) -> None:
    sweep.let_run(5)
    driver = sweep.start()
    sweep.wait_for_runs(8, driver)
    sweep.wait_for_records(5, driver)
    task = tasks("RUNNING")[0]
    asked(
        "scancel", "--signal=USR2", task
    )  # what Slurm sends before the time limit, and before some preemptions
    wait(lambda: task not in tasks("RUNNING"), "the job to leave its node", sweep, driver)
    sweep.let_all_run()
    assert driver.wait() == 0, sweep.said
    assert sweep.runs().total() == POINTS + 1  # the point that ran when the signal came
    assert "submitting again" not in sweep.said
    assert len(sweep.jobs()) == 1


def test_a_point_that_kills_its_job_fails_and_takes_no_other_along(node: Path, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "trace.name=die,any", "workload.seed=range(4)", "execute.attempts=2")
    assert sweep.finish() == 1
    assert len(sweep.records()) == 4
    assert sweep.runs() == Counter(
        {f"any {seed}": 1 for seed in range(4)} | {f"die {seed}": 2 for seed in range(4)}
    )
    assert "2 jobs ended without a result of it" in sweep.said


def test_a_failing_point_names_its_log_and_is_tried_again_by_the_same_command(
    node: Path, tmp_path: Path
) -> None:
    sweep = sweep_of(tmp_path, "trace.name=fail,any", "workload.seed=range(2)")
    assert sweep.finish() == 1
    assert "RuntimeError: the point is broken (log: " in sweep.said
    (tmp_path / "fixed").touch()
    assert sweep.finish() == 0, sweep.said
    assert sweep.runs() == Counter({"any 0": 1, "any 1": 1, "fail 0": 2, "fail 1": 2})


def test_several_points_of_a_job_run_at_once_where_it_has_cores(node: Path, tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, "execute.jobs=1", "execute.cpus=3")
    sweep.let_run(0)
    driver = sweep.start()
    sweep.wait_for_runs(3, driver)
    sweep.let_all_run()
    assert driver.wait() == 0, sweep.said
    assert sweep.runs() == ONCE


def test_a_wrong_partition_is_refused_in_slurms_words(sweep: Sweep) -> None:
    assert sweep.finish("execute.partition=nowhere") == 2
    assert "invalid partition specified: nowhere" in sweep.said
    assert "Traceback" not in sweep.said
    assert sweep.runs() == Counter()


def test_another_place_is_refused_while_jobs_work_on_the_store(sweep: Sweep) -> None:
    sweep.let_run(0)
    driver = sweep.start()
    sweep.wait_for_runs(3, driver)
    driver.kill()
    driver.wait()
    assert sweep.finish("execute=local") == 2
    assert "would run their points twice" in sweep.said
    assert sweep.runs().total() == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a small file system")
def test_a_full_disk_stops_the_sweep_and_cancels_its_jobs(sweep: Sweep) -> None:
    store = sweep.folder / "results"
    store.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(store)], check=True)
    try:
        assert sweep.finish() == 1
        assert "the disk is full" in sweep.said
        assert "Points that were committed before are kept." in sweep.said
        assert "Traceback" not in sweep.said
        wait(lambda: not tasks("PENDING,RUNNING"), "the jobs to be cancelled", sweep)
        kept = len(sweep.records())
        subprocess.run(["mount", "-o", "remount,size=64m", str(store)], check=True)
        assert sweep.finish() == 0, sweep.said
        assert 0 < kept < POINTS
        assert len(sweep.records()) == POINTS
        assert set(sweep.runs()) == set(ONCE)
    finally:
        subprocess.run(["umount", str(store)], check=True)
