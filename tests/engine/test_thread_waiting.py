"""torch's threads sleep between two operators, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest


@pytest.mark.nightly
@pytest.mark.parametrize(("own", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")])
def test_openmp_is_told_how_to_wait_before_torch_starts_it(own, expected):
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", "import engine, torch"],
        env={**environment, "OMP_DISPLAY_ENV": "true", "PYTHONPATH": os.pathsep.join(sys.path), **own},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"OMP_WAIT_POLICY = '{expected}'" in done.stderr
