"""A store on object storage (`out=s3://BUCKET/PREFIX`): a local copy, and what it exchanges with the bucket.

Commands work on the copy, which is a store like any other. What is read comes into it, by the objects' ETags only what
has changed; a point that is committed in it goes to the bucket.

There are no renames in a bucket. So the files of a point have names that begin with their digest: two writers never
overwrite each other's. The record, which names these digests, is written last, in one request, and unless it replaces
one that was read before, on the condition that there is none (`If-None-Match: *`). So a point is there whole or not at
all, and the first of two records stays. A lease keeps a second sweep out before that.

The lease: `lease/N.json` below the store's address; the highest number holds. A new holder creates the next number by a
conditional write, which the server grants to one of several. The holder writes its own object again every 20 seconds.
Who wants the store watches it: a holder that changes nothing for 90 seconds is gone. No clocks of two machines are
compared. A holder that was stopped for longer notices before it writes the next point.
"""

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError
from harness.config.paths import bucket_of, is_url
from harness.console import install_hint
from harness.store import BusyStoreError, StoreError
from harness.store.atomic import exclusive, has_ended, owner, write_files
from harness.store.commit import DAMAGED, Layout, file_fault, read_sealed

RENEW_S = 20.0
STALE_S = 90.0
_LOOK_S = 5.0
_UNSURE_S = 45.0  # after so long without a renewal the holder looks before it writes
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Lease:
    """The right to write below `root`.

    Args:
        files: the object storage: `cat_file`, `pipe_file` with `mode="create"`, `find` and `rm_file` of fsspec.
        root: bucket and prefix.
        renew_s: seconds between two renewals.
        stale_s: a holder that changes nothing for so long is gone.
    """

    def __init__(self, files: Any, root: str, *, renew_s: float = RENEW_S, stale_s: float = STALE_S) -> None:
        self._files, self._root = files, f"{root}/lease"
        self._renew_s, self._stale_s = renew_s, stale_s
        self._number, self._beat = 0, 0
        self._confirmed = 0.0
        self._ended = threading.Event()

    @contextmanager
    def held(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Hold the lease inside the block; `tell` hears why it takes time.

        Raises:
            BusyStoreError: another sweep holds it, and lives.
            ConfigError: the server ignores conditions, so two sweeps could not be kept apart.
        """
        self._take(tell)
        keeper = threading.Thread(target=self._keep, daemon=True)
        keeper.start()
        try:
            yield
        finally:
            self._ended.set()
            keeper.join()
            self._give_back(tell)

    def check(self) -> None:
        """Before something is written: whether the lease is still held.

        Raises:
            StoreError: another sweep took the store over.
        """
        if _now() - self._confirmed > _UNSURE_S * self._stale_s / STALE_S:
            self._renew()

    def _give_back(self, tell: Callable[[str], None]) -> None:
        try:
            if self._highest() == self._number:
                self._write(free=True)
        except Exception as error:  # the points are kept, and the lease ends by itself
            said = " ".join(str(error).split())[:200]
            tell(
                f"the lease could not be given back ({said}); the next sweep waits {self._stale_s:.0f} s for it"
            )

    def _take(self, tell: Callable[[str], None]) -> None:
        while True:
            number = self._highest()
            if number:
                self._wait_for(number, tell)
            self._number, self._beat = number + 1, 0
            try:
                self._write(mode="create")
                break
            except FileExistsError:
                continue  # another one was faster: it is watched now
        try:
            self._write(mode="create")
        except FileExistsError:
            pass
        else:
            raise ConfigError(
                "out",
                "this object storage ignores 'If-None-Match: *', so two sweeps could overwrite each other's points; "
                "use a server that knows conditional writes (S3, or MinIO and Ceph of 2024 or later), or a folder",
            )
        for older in self._numbers():
            if older < self._number:
                self._files.rm_file(self._path(older))

    def _wait_for(self, number: int, tell: Callable[[str], None]) -> None:
        """Return when the holder of this number has gone; raise BusyStoreError when it shows that it lives."""
        first = self._read(number)
        who = str(first.get("owner"))
        if first.get("free") or (first.get("boot") == _boot() and has_ended(who)):
            return
        tell(
            f"{who} holds {self._root.removesuffix('/lease')}; looking for up to {self._stale_s:.0f} s whether it lives"
        )
        begun = _now()
        while _now() - begun < self._stale_s:
            time.sleep(min(_LOOK_S, self._stale_s / 10))
            if self._highest() != number or self._read(number) != first:
                reason = f"another sweep ({who}) is writing there; wait for it, or choose another place with out=..."
                raise BusyStoreError(reason)

    def _keep(self) -> None:
        while not self._ended.wait(self._renew_s):
            try:
                self._renew()
            except Exception:
                self._confirmed = float("-inf")

    def _renew(self) -> None:
        highest = self._highest()
        if highest != self._number:
            raise StoreError(
                "another sweep took this store over, because it saw no sign of life from this one; points that were "
                "written before are kept, the same command does the rest"
            )
        self._beat += 1
        self._write()
        self._confirmed = _now()

    def _write(self, *, mode: str = "overwrite", free: bool = False) -> None:
        content = {"owner": owner(), "boot": _boot(), "beat": self._beat, "free": free}
        self._files.pipe_file(self._path(self._number), json.dumps(content).encode(), mode=mode)
        self._confirmed = _now()

    def _read(self, number: int) -> dict[str, Any]:
        try:
            value = json.loads(self._files.cat_file(self._path(number)))
        except (FileNotFoundError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _highest(self) -> int:
        return max(self._numbers(), default=0)

    def _numbers(self) -> list[int]:
        self._files.invalidate_cache()
        stems = [name.rpartition("/")[2].removesuffix(".json") for name in self._files.find(self._root)]
        return [int(stem) for stem in stems if stem.isdecimal()]

    def _path(self, number: int) -> str:
        return f"{self._root}/{number:08d}.json"


def _now() -> float:
    """Seconds that also pass while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot() -> str:
    """This start of this machine, so that a process id of another one is not looked for here."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


_INDEX, _ADDRESS = ".index.json", ".address"
_PART = re.compile(r"[\w][\w.=,+-]{0,200}")  # of a path in the bucket that becomes a path here
_DATA = re.compile(r"points/(\w+)/([0-9a-f]{32})-([\w.-]+)")
_RECORD = re.compile(r"points/(\w+)/(record|failure)\.json")
_BATCH = 100  # points that are exchanged at a time
_OWN = ("lease", DAMAGED)  # folders of the bucket that have no copy here
_OFTEN = 200  # points after which the index is written
_PATIENCE = {"connect_timeout": 5, "read_timeout": 60, "retries": {"max_attempts": 3, "mode": "standard"}}

Tell = Callable[[str], None]


def local_place(out: str) -> Path:
    """The folder of a store: `out` itself, or of an address on object storage its local copy."""
    if not is_url(out):
        return Path(out)
    bucket, prefix = bucket_of(out)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagetwin" / "stores"
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    digest = hashlib.blake2b(f"{endpoint} {bucket}/{prefix}".encode(), digest_size=6).hexdigest()
    last = re.sub(r"[^\w.-]", "-", prefix.rpartition("/")[2] or bucket)[-40:]
    return base / f"{last}-{digest}"


def shown(root: Path) -> str:
    """The name of a store for people: its address on object storage, or its folder."""
    try:
        return (root / _ADDRESS).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return str(root)


@dataclass
class RemoteStore:
    """A store in a bucket and its copy in `folder`. All methods but `at` raise StoreError when the server fails."""

    url: str
    files: Any  # the object storage as a file system of fsspec
    root: str  # bucket and prefix
    folder: Path
    # by key: the token of what the copy holds; size, time
    seen: dict[str, list[Any]] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)  # points with a record in the bucket
    _lease: Lease | None = None
    _pushed: int = 0

    @classmethod
    def at(cls, url: str) -> "RemoteStore":
        """The store at an address.

        Raises:
            ConfigError: no address on S3, or s3fs is missing.
        """
        bucket, prefix = bucket_of(url)
        try:
            import fsspec

            files = fsspec.filesystem(
                "s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=_PATIENCE
            )
        except ImportError:
            reason = f"s3:// needs s3fs, which is not installed: {install_hint('s3')}"
            raise ConfigError("out", reason) from None
        return cls(url, files, f"{bucket}/{prefix}".rstrip("/"), local_place(url))

    def __post_init__(self) -> None:
        """Read what the copy holds; without a readable index everything is fetched anew."""
        try:
            found = json.loads((self.folder / _INDEX).read_bytes())
            self.seen = {str(key): list(value) for key, value in found.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            self.seen = {}

    @contextmanager
    def writing(self, tell: Tell) -> Iterator[None]:
        """Hold the lease, bring the copy up to date, and at the end send what the block changed beside the points.

        The caller holds the lock of the copy.

        Raises:
            BusyStoreError: another sweep writes there.
            ConfigError: the server cannot be reached or refuses, or does not keep two writers apart.
        """
        with ExitStack() as stack:
            with self._speaking(ConfigError):
                lease = Lease(self.files, self.root)
                stack.enter_context(lease.held(tell))
                self._lease = lease
                stack.callback(self._keep_index)
                self.pull()
            self._push_left(tell)
            yield
            self.push_rest()

    def refresh(self, tell: Tell, *, fresh: bool = False) -> None:
        """Bring the copy up to date for reading. While a sweep of this machine writes it, it is up to date.

        Raises:
            ConfigError: the server cannot be reached or refuses.
        """
        try:
            with exclusive(self.folder), self._speaking(ConfigError):
                self.pull(fresh=fresh)
                only = self._only_here()
        except BusyStoreError:
            tell(f"a sweep of this machine is writing to {self.url}; this is what it has so far")
            return
        if only:
            tell(
                f"{len(only):,} points are on this machine alone: the sweep that made them could not send them. The "
                "same sweep sends them when it is given again"
            )

    def pull(self, *, fresh: bool = False) -> None:
        """Fetch what has changed in the bucket, delete what has gone there; `fresh`: fetch everything again."""
        with self._speaking():
            listed = self._listed()
            write_files(self.folder, {_ADDRESS: f"{self.url.rstrip('/')}\n".encode()})
            self._forget([key for key in self.seen if key not in listed])
            if fresh:
                self.seen.clear()
            self.there = {
                found[1] for key in listed if (found := _RECORD.fullmatch(key)) and found[2] == "record"
            }
            changed = [key for key, (token, _) in listed.items() if self.seen.get(key, [None])[0] != token]
            records = [key for key in changed if _RECORD.fullmatch(key)]
            records += self._incomplete(listed, set(records))
            plain = [key for key in changed if not key.startswith("points/") and _is_plain(key)]
            for first in range(0, len(records), _BATCH):
                self._fetch_points(records[first : first + _BATCH], listed)
            for first in range(0, len(plain), _BATCH):
                self._fetch_plain(plain[first : first + _BATCH], listed)
            self._keep_index()

    def push_point(self, name: str) -> None:
        """Send a point that was committed in the copy, or its failure. If another's record is there, that is taken."""
        point, layout = f"{self.root}/points/{name}", Layout(self.folder)
        with self._speaking():
            if self._lease is not None:
                self._lease.check()
            if not layout.record(name).exists():
                self._put(f"points/{name}/failure.json", layout.failure(name).read_bytes())
                return
            data = layout.record(name).read_bytes()
            digests = read_sealed(data)["digests"]
            parts = {
                f"{point}/{digest}-{file}": layout.point(name) / file for file, digest in digests.items()
            }
            self.files.pipe({key: path.read_bytes() for key, path in parts.items()})
            try:
                self._put(f"points/{name}/record.json", data, create=name not in self.there)
            except FileExistsError:
                self.pull()
                return
            self.there.add(name)
            if f"points/{name}/failure.json" in self.seen:
                self._remove([f"points/{name}/failure.json"])
        self._pushed += 1
        if self._pushed % _OFTEN == 0:
            self._keep_index()

    def push_rest(self) -> None:
        """Send what has changed beside the points (report, summary), the manifest last; delete what has gone."""
        with self._speaking():
            if self._lease is not None:
                self._lease.check()
            here = {str(path.relative_to(self.folder)): path for path in self._plain_files()}
            manifest = Layout(self.folder).manifest.name
            for key in sorted(here, key=lambda key: key == manifest):
                stat = here[key].stat()
                if self.seen.get(key, [])[1:] != [stat.st_size, stat.st_mtime_ns]:
                    self._put(key, here[key].read_bytes())
            self._remove([key for key in self.seen if not key.startswith("points/") and key not in here])

    def set_aside(self, names: Sequence[str]) -> None:
        """Move points of the bucket to `damaged/`, their records first."""
        with self._speaking():
            for name in names:
                point = f"{self.root}/points/{name}/"
                keys = sorted(self.files.find(point), key=lambda key: not key.endswith("/record.json"))
                for key in keys:
                    bare = key.lstrip("/")
                    self.files.copy(bare, f"{self.root}/{DAMAGED}/{name}/{bare.removeprefix(point)}")
                    self.files.rm_file(bare)
                self._forget([key for key in list(self.seen) if key.startswith(f"points/{name}/")])
                self.there.discard(name)

    def _push_left(self, tell: Tell) -> None:
        """Send the points that a sweep committed here and could not send."""
        left = self._only_here()
        for name in left:
            self.push_point(name)
        if left:
            tell(f"{len(left):,} points of an earlier sweep were on this machine alone; sent to {self.url}")

    def _only_here(self) -> list[str]:
        layout = Layout(self.folder)
        names = sorted(path.name for path in layout.points.iterdir()) if layout.points.is_dir() else []
        return [name for name in names if name not in self.there and self._is_whole(name)]

    def _is_whole(self, name: str) -> bool:
        path = Layout(self.folder).record(name)
        try:
            digests = read_sealed(path.read_bytes())["digests"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return not any(file_fault(path.with_name(file), digest) for file, digest in digests.items())

    def _listed(self) -> dict[str, tuple[str, int]]:
        """Token and size of every object by its key."""
        self.files.invalidate_cache()
        found = self.files.find(self.root, detail=True)
        start = len(self.root) + 1
        named = {path.lstrip("/")[start:]: entry for path, entry in found.items()}
        return {
            key: (_token(entry), int(entry["size"]))
            for key, entry in named.items()
            if key.partition("/")[0] not in _OWN
        }

    def _incomplete(self, listed: dict[str, tuple[str, int]], known: set[str]) -> list[str]:
        """Records that have not changed, with a file beside them that the copy lacks."""
        sizes = {
            f"points/{found[1]}/{found[3]}": size
            for key, (_, size) in listed.items()
            if (found := _DATA.fullmatch(key))
        }
        lacking = {path.split("/")[1] for path, size in sizes.items() if _size(self.folder / path) != size}
        keys = [f"points/{name}/record.json" for name in sorted(lacking)]
        return [key for key in keys if key in listed and key not in known]

    def _fetch_points(self, keys: Sequence[str], listed: dict[str, tuple[str, int]]) -> None:
        records = self._cat(keys)
        wanted: dict[str, str] = {}  # key -> name of the file here
        for key, data in records.items():
            folder = key.rpartition("/")[0]
            for file, digest in _digests(data).items():
                wanted[f"{folder}/{digest}-{file}"] = file
        parts = self._cat([key for key in wanted if key in listed])
        for key, data in records.items():
            folder, _, name = key.rpartition("/")
            files = {
                wanted[part]: content for part, content in parts.items() if part.startswith(f"{folder}/")
            }
            last = name if name == "record.json" else None
            write_files(self.folder / folder, {**(files if last else {}), name: data}, last=last)
            self.seen[key] = [listed[key][0]]

    def _fetch_plain(self, keys: Sequence[str], listed: dict[str, tuple[str, int]]) -> None:
        for key, data in self._cat(keys).items():
            folder, _, name = key.rpartition("/")
            write_files(self.folder / folder, {name: data})
            self._note(key, listed[key][0])

    def _cat(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The content of objects by key; one that has gone meanwhile is left out."""
        if not keys:
            return {}
        found = self.files.cat([f"{self.root}/{key}" for key in keys], on_error="return")
        start = len(self.root) + 1
        contents: dict[str, bytes] = {}
        for path, content in found.items():
            if isinstance(content, FileNotFoundError):
                continue
            if isinstance(content, Exception):
                raise content
            contents[path.lstrip("/")[start:]] = content
        return contents

    def _put(self, key: str, data: bytes, *, create: bool = False) -> None:
        path = f"{self.root}/{key}"
        self.files.pipe_file(path, data, mode="create" if create else "overwrite")
        self._note(key, _token(self.files.info(path)))

    def _note(self, key: str, token: str) -> None:
        stat = (self.folder / key).stat()
        self.seen[key] = [token] if _RECORD.fullmatch(key) else [token, stat.st_size, stat.st_mtime_ns]

    def _remove(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self.files.rm_file(f"{self.root}/{key}")
            del self.seen[key]

    def _forget(self, keys: Iterable[str]) -> None:
        """Delete the copies of objects that have gone from the bucket."""
        for key in keys:
            del self.seen[key]
            found = _RECORD.fullmatch(key)
            if found and found[2] == "record":
                shutil.rmtree(self.folder / "points" / found[1], ignore_errors=True)
            elif found or _is_plain(key):
                (self.folder / key).unlink(missing_ok=True)

    def _plain_files(self) -> Iterator[Path]:
        for path in sorted(self.folder.rglob("*")):
            parts = path.relative_to(self.folder).parts
            if path.is_file() and parts[0] not in ("points", *_OWN) and _is_plain("/".join(parts)):
                yield path

    def _keep_index(self) -> None:
        write_files(self.folder, {_INDEX: json.dumps(self.seen).encode()})

    @contextmanager
    def _speaking(self, kind: type[ConfigError] | None = None) -> Iterator[None]:
        """Turn errors of the server and of the network into one sentence: ConfigError if `kind`, else StoreError."""
        try:
            yield
        except StoreError as error:
            if kind is None:
                raise
            raise kind("out", str(error)) from error
        except FileExistsError:
            raise
        except Exception as error:
            if not _is_of_storage(error):
                raise
            said = " ".join(str(error).split())[:300] or type(error).__name__
            text = f"cannot use {self.url}: {said}; check address, credentials and AWS_ENDPOINT_URL"
            raise (kind("out", text) if kind else StoreError(text)) from error


def _is_of_storage(error: Exception) -> bool:
    """Whether the server, the network or the credentials made the error, and no bug."""
    package = type(error).__module__.partition(".")[0]
    if str(error).startswith("Invalid endpoint"):  # botocore raises a bare ValueError
        return True
    return isinstance(error, OSError) or package in ("botocore", "aiobotocore", "aiohttp", "fsspec")


def _token(entry: dict[str, Any]) -> str:
    """What changes when an object changes: its ETag, or size and time where there is none."""
    tag = entry.get("ETag") or entry.get("etag")
    return str(tag) if tag else f"{entry['size']} {entry.get('created') or entry.get('mtime')}"


def _digests(data: bytes) -> dict[str, str]:
    """The files that a record names, with their digests; none where it cannot be read."""
    try:
        found = json.loads(data).get("digests") or {}
        return {str(name): str(digest) for name, digest in found.items() if _PART.fullmatch(str(name))}
    except (ValueError, AttributeError):
        return {}


def _is_plain(key: str) -> bool:
    """Whether a key may be a path in the copy: it stays inside, and no part is hidden."""
    return all(_PART.fullmatch(part) for part in key.split("/"))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
