"""docker/Dockerfile, which no test can build: what it takes from this repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from _check_installed import pins


def test_packages_of_the_image(repo_root: Path) -> None:
    """The image's own torch replaced by PyPI's, a package that running lacks, or another Megatron Core."""
    text = (repo_root / "docker" / "Dockerfile").read_text(encoding="utf-8")
    [command] = re.findall(r"sed -E '.*' requirements\.txt", text)
    done = subprocess.run(["bash", "-c", command], cwd=repo_root, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    needed = pins(repo_root / "requirements.txt")
    assert [word.partition("==")[0] for word in words] == [name for name in needed if name != "torch"]
    assert [word for word in words if "==" in word] == [f"megatron-core=={needed['megatron-core']}"]
    user = re.findall(r"^USER (\d+):\d+$", text, re.MULTILINE)
    assert user and user != ["0"], "runs as root"
    [script] = re.findall(r'^ENTRYPOINT \["/usr/bin/python", "(.+)"\]$', text, re.MULTILINE)
    assert (repo_root / script).is_file()
