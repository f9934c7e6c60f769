"""A store on object storage: points are there whole or not at all, and two writers never mix theirs.

Most tests use fsspec's storage in memory. Those at the end use a server of S3 (`pip install s3fs 'moto[server]'`), and
are left out where that is missing.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_point
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from harness.cli.main import main
from harness.config.errors import ConfigError
from harness.metrics.record import PointRecord
from harness.store import BusyStoreError, StoreError
from harness.store.commit import commit_failure, commit_point, read_store
from harness.store.remote import Lease, RemoteStore

ONE, TWO = "1" * 32, "2" * 32
ELSEWHERE = {"owner": "elsewhere-4-7", "boot": "another", "beat": 0, "free": False}


@pytest.fixture
def bucket() -> Iterator[MemoryFileSystem]:
    files = MemoryFileSystem()
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture
def machine(bucket: MemoryFileSystem, tmp_path: Path) -> Callable[[str], RemoteStore]:
    """The store as a machine of this name sees it, with a copy of its own."""

    def see(name: str) -> RemoteStore:
        return RemoteStore("s3://bucket/study", bucket, "bucket/study", tmp_path / name)

    return see


def quiet(text: str) -> None:
    pass


def commit(store: RemoteStore, name: str, value: int) -> None:
    commit_point(store.folder, name, PointRecord(simulated={"value": value}), {"steps": {"step": [value]}})


def values(store: RemoteStore) -> dict[str, int]:
    store.pull()
    content = read_store(store.folder)
    assert content.problems == []
    return {name: record.simulated["value"] for name, record in content.records.items()}


def keys(bucket: MemoryFileSystem) -> list[str]:
    return [path.removeprefix("/bucket/study/") for path in bucket.find("bucket/study")]


def test_a_point_that_is_sent_is_read_elsewhere(machine: Callable[[str], RemoteStore]) -> None:
    here = machine("here")
    commit(here, ONE, 5)
    here.push_point(ONE)
    assert values(machine("there")) == {ONE: 5}


def test_a_writer_that_dies_before_the_record_leaves_no_point(
    machine: Callable[[str], RemoteStore], bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine("here")
    commit(here, ONE, 5)
    real = bucket.pipe_file

    def die(path: str, data: bytes, **options: Any) -> None:
        if path.endswith("record.json"):
            raise KeyboardInterrupt
        real(path, data, **options)

    monkeypatch.setattr(bucket, "pipe_file", die)
    with pytest.raises(KeyboardInterrupt):
        here.push_point(ONE)
    assert len(keys(bucket)) == 1  # its table
    assert values(machine("there")) == {}


def test_a_point_that_could_not_be_sent_is_sent_by_the_next_sweep(
    machine: Callable[[str], RemoteStore],
) -> None:
    commit(machine("here"), ONE, 5)
    said: list[str] = []
    with machine("here").writing(said.append):
        pass
    assert said == ["1 points of an earlier sweep were on this machine alone; sent to s3://bucket/study"]
    assert values(machine("there")) == {ONE: 5}


def test_of_two_records_of_a_point_the_first_stays_with_its_own_tables(
    machine: Callable[[str], RemoteStore],
) -> None:
    first, second = machine("first"), machine("second")
    commit(first, ONE, 1)
    commit(second, ONE, 2)
    first.push_point(ONE)
    second.push_point(ONE)
    assert values(machine("third")) == values(second) == {ONE: 1}


def test_a_damaged_point_that_was_read_may_be_replaced(
    machine: Callable[[str], RemoteStore], bucket: MemoryFileSystem
) -> None:
    here = machine("here")
    commit(here, ONE, 1)
    here.push_point(ONE)
    (table,) = (key for key in keys(bucket) if key.endswith("parquet"))
    bucket.pipe_file(f"bucket/study/{table}", b"PAR1 changed PAR1")
    there = machine("there")
    there.pull()
    assert "does not match its digest" in read_store(there.folder).problems[0]
    commit(there, ONE, 1)
    there.push_point(ONE)
    assert values(machine("third")) == {ONE: 1}


def test_only_what_has_changed_is_fetched_again(
    machine: Callable[[str], RemoteStore], bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = machine("here"), machine("there")
    for name in (ONE, TWO):
        commit(here, name, 1)
        here.push_point(name)
    there.pull()
    commit(here, TWO, 2)
    here.push_point(TWO)
    fetched: list[str] = []
    real = bucket.cat

    def cat(paths: list[str], **options: Any) -> Any:
        fetched.extend(paths)
        return real(paths, **options)

    monkeypatch.setattr(bucket, "cat", cat)
    assert values(machine("there")) == {ONE: 1, TWO: 2}
    assert fetched
    assert all(TWO in path for path in fetched)


def test_a_point_that_was_deleted_in_the_bucket_goes_from_the_copies(
    machine: Callable[[str], RemoteStore], bucket: MemoryFileSystem
) -> None:
    here = machine("here")
    commit(here, ONE, 1)
    here.push_point(ONE)
    there = machine("there")
    assert values(there) == {ONE: 1}
    bucket.rm("bucket/study/points", recursive=True)
    assert values(there) == {}
    assert there._only_here() == []


def test_a_failure_is_sent_and_goes_when_the_point_is_done(machine: Callable[[str], RemoteStore]) -> None:
    here, there = machine("here"), machine("there")
    commit_failure(here.folder, ONE, {"error": "broken"})
    here.push_point(ONE)
    there.pull()
    assert read_store(there.folder).failures[ONE]["error"] == "broken"
    commit(here, ONE, 1)
    here.push_point(ONE)
    there.pull()
    assert read_store(there.folder).failures == {}


def test_a_key_that_leaves_the_copy_is_not_fetched(
    machine: Callable[[str], RemoteStore], bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    for key in ("../escaped", "report/../../escaped", ".hidden", "points/../../escaped/record.json"):
        bucket.store[f"/bucket/study/{key}"] = bucket.open(f"/bucket/other/{key.replace('.', '_')}", "wb")
    here = machine("here")
    assert "report/../../escaped" in here._listed()
    here.pull()
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [".address", ".index.json"]
    assert not list(tmp_path.rglob("escaped"))


def test_the_manifest_is_sent_after_the_report_it_names(
    machine: Callable[[str], RemoteStore], bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine("here")
    (here.folder / "report").mkdir(parents=True)
    for name in ("a.txt", "sweep.json", "report/index.html", "z.txt"):
        (here.folder / name).write_text(name)
    sent: list[str] = []
    real = bucket.pipe_file

    def note(path: str, data: bytes, **options: Any) -> None:
        sent.append(path)
        real(path, data, **options)

    monkeypatch.setattr(bucket, "pipe_file", note)
    here.push_rest()
    assert sent[-1] == "bucket/study/sweep.json"
    assert len(sent) == 4
    (here.folder / "z.txt").unlink()
    here.push_rest()
    assert keys(bucket) == ["a.txt", "report/index.html", "sweep.json"]


def test_a_second_sweep_is_refused_while_the_first_lives(
    bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.store.remote._LOOK_S", 0.02)  # seconds between two looks
    with (
        Lease(bucket, "bucket/study", renew_s=0.02).held(quiet),
        pytest.raises(BusyStoreError, match=r"another sweep .* is writing there"),
        Lease(bucket, "bucket/study", stale_s=50).held(quiet),
    ):
        pass


def test_a_lease_that_was_given_back_is_free_at_once(bucket: MemoryFileSystem) -> None:
    said: list[str] = []
    for _ in range(3):
        with Lease(bucket, "bucket/study").held(said.append):
            pass
    assert said == []
    assert keys(bucket) == ["lease/00000003.json"]


def test_a_holder_that_shows_no_sign_of_life_is_followed(bucket: MemoryFileSystem) -> None:
    bucket.pipe_file("bucket/study/lease/00000004.json", json.dumps(ELSEWHERE).encode())
    with Lease(bucket, "bucket/study", stale_s=0.05).held(quiet):
        assert keys(bucket) == ["lease/00000005.json"]


def test_a_dead_process_of_this_machine_is_followed_at_once(bucket: MemoryFileSystem) -> None:
    with Lease(bucket, "bucket/study").held(quiet):
        (key,) = keys(bucket)
    mine = json.loads(bucket.cat_file(f"bucket/study/{key}"))
    dead = {**mine, "owner": mine["owner"].rpartition("-")[0] + "-1", "free": False}
    bucket.pipe_file(f"bucket/study/{key}", json.dumps(dead).encode())
    with Lease(bucket, "bucket/study", stale_s=10_000).held(quiet):
        assert keys(bucket) == ["lease/00000002.json"]


def test_a_holder_that_was_followed_writes_nothing_more(machine: Callable[[str], RemoteStore]) -> None:
    here = machine("here")
    commit(here, ONE, 1)
    lease = Lease(here.files, here.root, stale_s=0.0)
    with lease.held(quiet):
        here._lease = lease
        here.files.pipe_file("bucket/study/lease/00000009.json", json.dumps(ELSEWHERE).encode())
        with pytest.raises(StoreError, match="another sweep took this store over"):
            here.push_point(ONE)
    assert values(machine("there")) == {}


def test_a_server_that_ignores_conditions_is_refused(
    bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bucket.pipe_file
    monkeypatch.setattr(bucket, "pipe_file", lambda path, data, mode="overwrite": real(path, data))
    with (
        pytest.raises(ConfigError, match="ignores 'If-None-Match"),
        Lease(bucket, "bucket/study").held(quiet),
    ):
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server of S3 on this machine."""
    pytest.importorskip("s3fs", reason="s3fs is not installed (pip install 'pagetwin[s3]')")
    moto = pytest.importorskip("moto.server", reason="moto is not installed (pip install 'moto[server]')")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def cli(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Runs a command line with a fresh bucket `bucket`; gives exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True)
    files.mkdir("bucket")

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words, point=fake_point, report=fake_point)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    yield run
    files.rm("bucket", recursive=True)


STORE = "s3://bucket/studies/one"
SWEEP = ("sweep", "cost.cache_dir=.", f"out={STORE}")


def runs(folder: Path) -> list[str]:
    file = folder / "runs.txt"
    return file.read_text().splitlines() if file.exists() else []


def forget_the_copy(folder: Path) -> None:
    shutil.rmtree(folder / "cache")


def test_a_sweep_on_s3_is_done_elsewhere_too(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert cli(*SWEEP, "workload.seed=1,2")[0] == 0
    forget_the_copy(tmp_path)
    code, out, _ = cli(*SWEEP, "workload.seed=1,2,3")
    assert code == 0
    assert runs(tmp_path) == ["azure_conv 1", "azure_conv 2", "azure_conv 3"]
    code, out, _ = cli(*SWEEP, "workload.seed=1,2,3")
    assert f"nothing left to do: all 3 points are in {STORE}" in out


def test_status_report_and_doctor_read_from_s3(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    cli(*SWEEP, "trace.name=ok,fail")
    forget_the_copy(tmp_path)
    code, out, _ = cli("status", STORE)
    assert code == 0
    assert f"{STORE}: sweep 'default', 1 of 2 points done" in out
    assert f"Go on with: python -m harness sweep cost.cache_dir=. out={STORE} trace.name=ok,fail" in out
    assert cli("report", STORE)[0] == 0
    forget_the_copy(tmp_path)
    assert "report: " in cli("status", STORE)[1]
    code, out, _ = cli("doctor", STORE)
    assert (code, out.splitlines()[0]) == (0, f"{STORE}: 1 record and 2 files beside them are whole")


def test_doctor_sees_damage_in_the_bucket_and_repairs_it(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    import s3fs

    cli(*SWEEP, "workload.seed=1,2")
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    table = next(path for path in files.find("bucket") if path.endswith("-steps.parquet"))
    content = files.cat_file(table)
    files.pipe_file(table, content[:50] + b"?" + content[51:])
    code, out, _ = cli("doctor", STORE)
    assert code == 1
    assert "does not match its digest" in out
    assert f"repair with: python -m harness doctor {STORE} --repair" in out
    code, out, _ = cli("doctor", STORE, "--repair")
    assert code == 0
    assert "1 of 1 damaged point repaired" in out
    assert cli("doctor", STORE)[1].startswith(f"{STORE}: 2 records and 4 files beside them are whole")
    assert len([path for path in files.find("bucket") if "/damaged/" in path]) == 3


def test_two_sweeps_cannot_write_one_store_on_s3(
    cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
    with Lease(files, STORE.removeprefix("s3://"), renew_s=0.1).held(quiet):
        code, _, err = cli(*SWEEP, "workload.seed=1,2")
    assert code == 2
    assert "is writing there; wait for it" in err
    assert runs(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sweep", "out=s3://nobucket/x"), "cannot use s3://nobucket/x: The specified bucket does not exist"),
        (("status", "s3://bucket/none"), "no results in 's3://bucket/none'"),
        (("report", STORE, "--out", "s3://bucket/y"), "--out s3://bucket/y: name a folder"),
    ],
)
def test_a_place_that_is_not_there_is_said_to_be(
    cli: Callable[..., tuple[int, str, str]], words: tuple[str, ...], said: str
) -> None:
    code, _, err = cli(*words)
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("address", "said"),
    [("http://127.0.0.1:9", "Could not connect to the endpoint"), ("nonsense", "Invalid endpoint: nonsense")],
)
def test_a_server_that_does_not_answer_is_named(
    cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    code, _, err = cli("status", STORE)
    assert code == 2
    assert f"cannot use s3://bucket/studies/one: {said}" in err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gs://bucket/x", "must be a folder or s3://BUCKET/PREFIX"),
        ("s3://B/x", "whose bucket must be"),
        ("s3://bucket", "which must name a place in the bucket"),
        ("s3://bucket/a/../b", "which must name a place in the bucket"),
        ("s3://bucket/a//b", "which must name a place in the bucket"),
    ],
)
def test_an_address_that_no_store_can_have_is_refused(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "measure=false", f"out={url}", "--dry-run"], point=fake_point) == 2
    assert said in capsys.readouterr().err
