"""Clusters: the points of a sweep in jobs of Slurm or in tasks of Ray, by `execute=slurm` and `execute=ray`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cluster.book import Book
from harness.config.errors import ConfigError
from harness.config.schema import Place
from harness.sweep.execute import PointBackend
from harness.sweep.plan import SweepPlan

if TYPE_CHECKING:
    from harness.point import PointSession


def backend_for(sweep: SweepPlan, session: "PointSession", *, force: bool = False) -> PointBackend | None:
    """The backend that `execute` asks for; None for this machine. The caller holds the lock of the store.

    Args:
        sweep: the whole sweep.
        session: runs and identifies points; nodes check by it that a point is what its name says.
        force: points are run although they have records.

    Raises:
        ConfigError: the cluster's programs or packages are missing, or it does not answer; or jobs of an earlier run
            still work on this store, and would do the same points.
    """
    place = sweep.points[0].config.execute.place
    if place is not Place.slurm or force:
        refuse_beside_jobs(sweep.out, "--force" if force else f"execute={place}")
    if place is Place.slurm:
        from harness.cluster.slurm import check_installed, run_on_slurm

        check_installed()
        return partial(run_on_slurm, session=session, force=force)
    if place is Place.ray:
        from harness.cluster.ray_tasks import check_ray, run_on_ray

        check_ray(sweep)
        return partial(run_on_ray, session=session)
    return None


def refuse_beside_jobs(out: Path, what: str) -> None:
    """Raise ConfigError if jobs of an earlier run may still commit points here, which `what` would run too."""
    from harness.cluster.slurm import QueueError, look

    book = Book.read(out)
    if not book.open_submissions():
        return
    try:
        states = look()
    except QueueError as error:
        raise ConfigError(
            "execute",
            f"an earlier run of '{out}' left jobs in Slurm, and whether they have ended cannot be asked from here "
            f"({error}); go on with execute=slurm on the cluster, or delete {book.path} if they have ended",
        ) from None
    jobs = sorted({job.name for job in states.values() if job.lives} & set(book.open_submissions()))
    if jobs:
        raise ConfigError(
            "execute",
            f"jobs of an earlier run still work on '{out}', and {what} would run their points twice; go on with "
            f"execute=slurm, wait, or stop them with: scancel --name={','.join(jobs)}",
        )
