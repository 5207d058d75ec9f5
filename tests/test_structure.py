"""The structure that docs/how-it-works.md draws: imports go one way, and files and packages stay small."""

import subprocess
import sys
from pathlib import Path

from paths import ROOT

PACKAGES = ("configs", "deployments", "flows", "tasks")
FILES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_imports_go_one_way():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_package_has_more_than_12_modules():
    packages = {path.parent for path in FILES}
    sizes = {str(p.relative_to(ROOT)): len([m for m in p.glob("*.py") if m.name != "__init__.py"]) for p in packages}
    assert {name: size for name, size in sizes.items() if size > 12} == {}
