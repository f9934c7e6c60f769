"""The lease of a store on object storage: one sweep at a time writes there.

`lease/N.json` below the store's address; the highest number holds. A new holder creates the next number by a
conditional write (`If-None-Match: *`), which the server grants to one of several. The holder writes its own object
again every 20 seconds. Who wants the store watches it: a holder that changes nothing for 90 seconds is gone. No clocks
of two machines are compared. A holder that was stopped for longer notices before it writes the next point.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError
from harness.store.atomic import has_ended, owner
from harness.store.errors import BusyStoreError, StoreError

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
                raise BusyStoreError(
                    f"another sweep ({who}) is writing there; wait for it, or choose another place with out=..."
                )

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
