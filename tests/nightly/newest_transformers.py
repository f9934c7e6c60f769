"""The engine's tests against the newest transformers that can be installed.

    python tests/nightly/newest_transformers.py [pytest's arguments; default: tests/engine/runtime]

transformers goes into an environment that is made for it and removed, on top of the packages of this one. Ends as
pytest does, or with 1 where it cannot be installed or a name of `paged_kernels.private` is gone.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASK = """
import torch, transformers
from importlib.metadata import version
print(f"transformers {version('transformers')}, torch {version('torch')}")
from transformers import AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
names = "_reorder_linear_weight _linear_pointwise _is_mkldnn_bf16_supported"
wanted = [(torch.ops.mkldnn, name) for name in names.split()]
wanted += [(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"), (torch.cuda, "_sleep")]
wanted += [(PreTrainedConfig, "_attn_implementation"), (PreTrainedModel, "_from_config")]
wanted += [(AttentionMaskInterface, "_global_mapping")]
gone = [name for owner, name in wanted if not hasattr(owner, name)]
raise SystemExit(f"gone: {', '.join(gone)}" if gone else 0)
"""


def main(arguments: list[str]) -> int:
    """Install, say the versions, run the tests; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="pagetwin-newest-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = subprocess.check_output(where, text=True).strip()
        Path(packages, "below.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        install = [python, "-m", "pip", "install", "--quiet", "--upgrade", "transformers"]
        if subprocess.run(install, check=False).returncode:
            return 1
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
        environment = {**os.environ, "PYTHONPATH": paths}
        if subprocess.run([python, "-c", ASK], env=environment, check=False).returncode:
            return 1
        command = [python, "-m", "pytest", "-q", *(arguments or ["tests/engine/runtime"])]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
